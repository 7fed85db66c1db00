"""Copies by NVIDIA's driver. A stand-in for it is compiled here: its GPU is the host's memory."""

from __future__ import annotations

import ctypes
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("jax") is None:
    pytest.skip("needs jax", allow_module_level=True)

import numpy as np

from everstep.jax import copying, cuda
from everstep.snapshots.segments import Segment

DRIVER = r"""
#include <stdint.h>
#include <string.h>
static char *known[1000]; static size_t sizes[1000];
int registered, largest, fails, registers = 1, current, unregisters = 1, lost;
static void *stack[10] = {(void *)7}; static int top;  /* what the thread uses itself is 7 */
int others(void) { return top == 0 && stack[0] == (void *)7; }
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal > 1; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &current; return 0; }
int cuCtxPushCurrent_v2(void *context) {
    if (lost) return 4;
    stack[++top] = context;
    current = context == &current;
    return 0;
}
int cuCtxPopCurrent_v2(void **context) {
    *context = stack[top--];
    current = stack[top] == &current;
    return 0;
}
int cuStreamCreate(void **stream, unsigned flags) { *stream = &registered; return 0; }
int cuStreamSynchronize(void *stream) { return stream != &registered; }
int cuMemHostRegister_v2(void *address, size_t size, unsigned flags) {
    if (!registers) return 2;
    known[registered] = address; sizes[registered++] = size;
    return 0;
}
int cuMemHostUnregister(void *address) {
    if (!unregisters || !current) return 1;
    for (int i = 0; i < registered; i++)
        if (known[i] == address) { known[i] = known[--registered]; sizes[i] = sizes[registered]; return 0; }
    return 1;
}
int cuMemcpyDtoHAsync_v2(void *target, uint64_t source, size_t size, void *stream) {
    int inside = 0;
    for (int i = 0; i < registered; i++)
        inside |= known[i] <= (char *)target && (char *)target + size <= known[i] + sizes[i];
    if (fails || !current || (registers && !inside)) return 1;  /* a copy can't go across two */
    if ((int)size > largest) largest = size;
    memcpy(target, (void *)source, size);
    return 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "driver.so", "driver.c"], cwd=folder, check=True)
    return folder / "driver.so"


@pytest.fixture
def driver(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ctypes.CDLL:
    """With counts of its own."""
    own = tmp_path / "driver.so"
    own.write_bytes(library.read_bytes())
    monkeypatch.setattr(cuda, "CHUNK", 64 << 10)
    monkeypatch.setattr(cuda, "PIECE", 16 << 10)
    return ctypes.CDLL(str(own))


def variable(driver: ctypes.CDLL, name: str) -> ctypes.c_int:
    return ctypes.c_int.in_dll(driver, name)


def put(gpu: cuda.Gpu) -> tuple[Segment, list[np.ndarray], float]:
    """Arrays into a segment, with holes between them, so that they begin anywhere and lie across chunks."""
    import jax

    arrays = [jax.random.normal(jax.random.key(n), (size,)) for n, size in enumerate((7, 50_000, 3, 20_000))]
    places, end = [], 64
    for array in arrays:
        places.append(copying.ArrayPlace(array, end))
        end += array.nbytes + 12
    segment = Segment.create("test", end)
    held_s = copying._Bringing(places, segment, gpu).wait()
    memory = segment.map()
    found = [np.frombuffer(memory, np.float32, p.array.size, p.start) for p in places]
    assert all(np.array_equal(here, array) for here, array in zip(found, arrays, strict=True))
    return segment, found, held_s


def test_what_the_driver_copies_is_what_was_there_in_pieces_of_which_each_lies_in_one_chunk(
    driver: ctypes.CDLL,
) -> None:
    segment, found, _ = put(cuda.Gpu(driver, 0))
    assert variable(driver, "registered").value == -(-segment.size // cuda.CHUNK)
    assert variable(driver, "largest").value <= cuda.PIECE
    found.clear()
    segment.close()
    assert variable(driver, "registered").value == 0, "the driver still knows of memory that is gone"


@pytest.mark.parametrize("refuses", ["copies", "memory"])
def test_where_the_driver_refuses_jax_copies_or_the_driver_does_so_more_slowly(
    driver: ctypes.CDLL, refuses: str
) -> None:
    gpu = cuda.Gpu(driver, 1)
    variable(driver, "fails").value = refuses == "copies"
    variable(driver, "registers").value = refuses != "memory"
    segment, _, held_s = put(gpu)
    assert held_s > 0
    assert variable(driver, "largest").value == (0 if refuses == "copies" else cuda.PIECE)
    segment.close()


def test_a_thread_goes_on_with_the_gpu_that_it_has_chosen_itself(driver: ctypes.CDLL) -> None:
    gpu = cuda.Gpu(driver, 1)
    assert driver.others()
    segment, found, _ = put(gpu)
    assert driver.others()
    found.clear()
    segment.close()
    assert driver.others()


@pytest.mark.parametrize(("trouble", "value"), [("unregisters", 0), ("lost", 1)])
def test_memory_goes_also_if_the_driver_has_lost_its_gpu(
    driver: ctypes.CDLL, trouble: str, value: int
) -> None:
    gpu = cuda.Gpu(driver, 0)
    segment, found, _ = put(gpu)
    found.clear()
    variable(driver, trouble).value = value
    segment.resize(segment.size)
    segment.close()


def test_a_device_that_is_none_of_nvidias_has_no_driver(driver: ctypes.CDLL) -> None:
    import jax

    assert cuda.gpu_of(jax.devices()[0]) is None
    with pytest.raises(cuda.CudaError, match="cuDeviceGet returned 1"):
        cuda.Gpu(driver, 2)
