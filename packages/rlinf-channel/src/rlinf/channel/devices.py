"""Items on accelerators, at both ends of a channel: claims instead of items, items for claims."""

from pathlib import Path

from rlinf.channel.cache import DeviceCache
from rlinf.channel.cargo import CLAIM, Cargo, pack, unpack
from rlinf.channel.claim import Claim, read_claim
from rlinf.channel.errors import ItemsLost
from rlinf.channel.link import LOST, Link
from rlinf.channel.session import CLIENT_SERVICE, Session, session_of
from rlinf.channel.tiers import Tiers
from rlinf.comm.errors import RemoteError
from rlinf.comm.handle import Handle


class Packer:
    """Closes what a producer puts. With `offload_to_cpu: false` what is on a device stays there.

    Args:
        link: Of the channel object.
        session: Of its endpoint.
    """

    def __init__(self, link: Link, session: Session) -> None:
        self._link = link
        self._session = session
        self._allow_pickle = link.endpoint.config.allow_pickle
        self._stays = not link.config.offload_to_cpu

    def pack(self, item: object) -> Cargo:
        """The item closed, or a claim on it. `CodecError`: it cannot be encoded."""
        if self._stays:
            nbytes = self._session.memory.device_bytes(item)
            if nbytes:
                number = self._cache().put(item, nbytes)
                me = self._link.endpoint
                return Claim(str(me.id), me.epoch, self._link.number, number).cargo(nbytes)
        return pack(item, allow_pickle=self._allow_pickle)

    @property
    def plain(self) -> bool:
        """Whether nothing stays on a device."""
        return not self._stays

    def forget(self, cargo: Cargo) -> None:
        """It was not put after all."""
        if cargo[0] == CLAIM:
            self._cache().done([_claim(cargo).number])

    def _cache(self) -> DeviceCache:
        caches, config = self._session.caches, self._link.config
        cache = caches.get(self._link.number)
        if cache is None:
            memory = self._session.memory
            room = config.device_cache_bytes(memory.free_bytes())
            folder = None if config.cache_folder is None else Path(config.cache_folder)
            tiers = Tiers(room, config.host_cache_bytes, disk=folder is not None)
            cache = caches[self._link.number] = DeviceCache(
                memory, tiers, folder, self._session.soon
            )
            self._session.start()
        return cache


def open_cargo(link: Link, cargo: Cargo) -> object:
    """What a consumer got, opened; a claim is redeemed, which may wait for its holder.

    Raises:
        CodecError: It cannot be decoded here.
        ItemsLost: It was a claim, and the process that had the item is gone.
    """
    if cargo[0] != CLAIM:
        return unpack(cargo, allow_pickle=link.endpoint.config.allow_pickle)
    claim, endpoint = _claim(cargo), link.endpoint
    try:
        if (claim.worker, claim.epoch) == (str(endpoint.id), endpoint.epoch):
            return session_of(endpoint).caches[claim.client].take(claim.number)
        ask = ("redeem", claim.client, claim.epoch, claim.number)
        reply: Handle[object] = endpoint.call(CLIENT_SERVICE, ask, to=claim.worker)
        return reply.result()
    except (KeyError, RemoteError, *LOST) as error:
        cure = f"it stayed on the accelerator of {claim.worker}, which has it no longer ({error!r})"
        raise ItemsLost(link.channel, claim.worker, 1, cure) from error


def _claim(cargo: Cargo) -> Claim:
    piece = cargo[2]
    assert isinstance(piece, bytes | bytearray | memoryview)
    return read_claim(piece)
