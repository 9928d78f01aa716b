"""How many bytes does the codec of image patches save on rendered frames, and at what speed?

Frames of MuJoCo tasks, rendered off screen, random actions: the arrays that an actor would send to
a learner. Raw bytes, zlib on the raw bytes, and the two codecs take turns on the same chunks. On a
network that is faster than a codec encodes, the codec loses time though it saves bytes.
"""

import os
import time
import zlib
from collections.abc import Callable

import numpy as np

from rlinf.comm.patches import PackedPatches, Patches

TASKS = ("HalfCheetah-v5", "Ant-v5", "Reacher-v5", "Pusher-v5")
SIZES = (84, 224)
CHUNK = 32

Frames = np.ndarray


def measure(quick: bool) -> dict[str, dict[str, object]]:
    """One table a size of image: share of the raw bytes, and megabytes of frames a second."""
    tasks = TASKS[:2] if quick else TASKS
    questions = {}
    for size in SIZES:
        rows = {
            task: _row(_render(task, size, 2 * CHUNK if quick else 4 * CHUNK)) for task in tasks
        }
        _print(size, rows)
        questions[f"{size}x{size}"] = rows
    return questions


def _render(task: str, size: int, count: int) -> Frames:
    """Frames (time, height, width, 3) of one or more episodes."""
    os.environ.setdefault("MUJOCO_GL", "egl")
    import gymnasium

    world = gymnasium.make(task, render_mode="rgb_array", width=size, height=size)
    world.reset(seed=0)
    world.action_space.seed(0)
    frames = []
    while len(frames) < count:
        _, _, ended, cut, _ = world.step(world.action_space.sample())
        frames.append(world.render())
        if ended or cut:
            world.reset()
    world.close()
    return np.stack(frames)


def _row(frames: Frames) -> dict[str, float]:
    chunks = [frames[start : start + CHUNK] for start in range(0, len(frames), CHUNK)]
    row: dict[str, float] = {"raw_mb": frames.nbytes / 1e6}
    encoders: dict[str, Callable[[Frames], bytes]] = {
        "zlib": lambda chunk: zlib.compress(chunk.tobytes(), 1),
        "patches": Patches().encode,
        "patches_zlib": PackedPatches().encode,
    }
    for name, encode in encoders.items():
        encode(chunks[0])
        begun = time.perf_counter()
        encoded = [encode(chunk) for chunk in chunks]
        seconds = time.perf_counter() - begun
        row[f"{name}_share"] = sum(map(len, encoded)) / frames.nbytes
        row[f"{name}_mb_s"] = frames.nbytes / 1e6 / seconds
        if name != "zlib":
            begun = time.perf_counter()
            for data, chunk in zip(encoded, chunks, strict=True):
                back = Patches().decode(memoryview(data), chunk.shape, chunk.dtype)
                assert (back == chunk).all()
            row[f"{name}_decode_mb_s"] = frames.nbytes / 1e6 / (time.perf_counter() - begun)
    single = [Patches().encode(frame) for frame in frames]
    row["single_share"] = sum(map(len, single)) / frames.nbytes
    return row


def _print(size: int, rows: dict[str, dict[str, float]]) -> None:
    print(f"\n{size} x {size}: share of the raw bytes (MB of frames a second: encode, decode)")
    print(f"{'task':16} {'zlib':>18} {'patches':>22} {'patches_zlib':>22} {'one frame':>10}")
    for task, row in rows.items():
        cells = [f"{row['zlib_share']:6.0%} ({row['zlib_mb_s']:.0f})"]
        for name in ("patches", "patches_zlib"):
            speeds = f"{row[f'{name}_mb_s']:.0f}, {row[f'{name}_decode_mb_s']:.0f}"
            cells.append(f"{row[f'{name}_share']:6.0%} ({speeds})")
        print(f"{task:16} {cells[0]:>18} {cells[1]:>22} {cells[2]:>22} {row['single_share']:10.0%}")
