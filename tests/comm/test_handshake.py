import pytest

from rlinf.comm import AuthenticationError, ProtocolError, WorkerId
from rlinf.comm.handshake import Acceptor, Dialler, Party, Refusal, read_refusal, refusal

A, B = Party(WorkerId("a", 0), 5), Party(WorkerId("b", 0), 9)
TOKEN = b"secret"


def test_both_sides_prove_that_they_hold_the_token():
    dialler, acceptor = Dialler(A, B, TOKEN), Acceptor(B, TOKEN)
    challenge = acceptor.challenge(dialler.hello)
    assert acceptor.peer == A
    proof, epoch = dialler.prove(challenge)
    assert epoch == 9
    assert acceptor.proven(proof)


def test_a_dialler_without_the_token_is_found_out():
    dialler, acceptor = Dialler(A, B, b"wrong"), Acceptor(B, TOKEN)
    challenge = acceptor.challenge(dialler.hello)
    with pytest.raises(AuthenticationError):
        dialler.prove(challenge)
    assert not acceptor.proven(bytes(32))


def test_an_acceptor_without_the_token_is_found_out():
    dialler = Dialler(A, B, TOKEN)
    challenge = Acceptor(B, b"wrong").challenge(dialler.hello)
    with pytest.raises(AuthenticationError, match="b/0"):
        dialler.prove(challenge)


def test_a_proof_is_good_for_one_connection():
    dialler, first, second = Dialler(A, B, TOKEN), Acceptor(B, TOKEN), Acceptor(B, TOKEN)
    proof, _ = dialler.prove(first.challenge(dialler.hello))
    second.challenge(dialler.hello)
    assert not second.proven(proof)


def test_a_proof_of_one_role_is_none_of_the_other():
    dialler, acceptor = Dialler(A, B, TOKEN), Acceptor(B, TOKEN)
    challenge = acceptor.challenge(dialler.hello)
    assert not acceptor.proven(challenge[-32:])


def test_who_else_listens_there_says_so():
    hello = Dialler(A, B, TOKEN).hello
    other = Party(WorkerId("c", 1), 9)
    assert Acceptor(other, TOKEN).challenge(hello) is Refusal.WRONG_WORKER


def test_what_is_meant_for_an_earlier_incarnation_is_refused():
    hello = Dialler(A, Party(B.id, 8), TOKEN).hello
    assert Acceptor(B, TOKEN).challenge(hello) is Refusal.WRONG_EPOCH
    anybody = Dialler(A, Party(B.id, 0), TOKEN).hello
    assert isinstance(Acceptor(B, TOKEN).challenge(anybody), bytes)


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(200), b"RLnf"])
def test_strangers_are_an_error(data):
    with pytest.raises(ProtocolError):
        Acceptor(B, TOKEN).challenge(data)
    with pytest.raises((ProtocolError, AuthenticationError)):
        Dialler(A, B, TOKEN).prove(data)


def test_another_version_is_refused():
    hello = bytearray(Dialler(A, B, TOKEN).hello)
    hello[4] = 99
    assert Acceptor(B, TOKEN).challenge(bytes(hello)) is Refusal.VERSION


def test_refusals_travel():
    assert read_refusal(refusal(Refusal.STALE, 7, "too old")) == (Refusal.STALE, 7, "too old")
    with pytest.raises(ProtocolError):
        read_refusal(b"\xff")
