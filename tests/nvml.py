"""A stand-in for NVML, the library of NVIDIA's driver, compiled here. It reports what a test writes down."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from everstep.process import gpus

GIB = 1 << 30
NOT_SUPPORTED = 3
DRIVER_NOT_LOADED = 9
UNKNOWN = 2**64 - 1

without_compiler = pytest.mark.skipif(
    shutil.which("gcc") is None and not os.environ.get("EVERSTEP_CI"), reason="there is no gcc here"
)

# Signatures and structs are those of nvml.h. The file has one fact per line.
_SOURCE = r"""
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned u;
typedef unsigned long long ull;
typedef struct { u pid; ull used; u gpu_instance, compute_instance; } Process;
typedef struct { u pid; ull at; u sm, memory, encoder, decoder; } Sample;
typedef struct { u gpu, memory; } Rates;
typedef struct { ull total, free, used; } Memory;

static struct { u busy; ull used; u processes; Process process[256]; int sm[256]; } gpus[8];
static u count;
static int init_code, rates_code, samples_code;

static void read_facts(void) {
    char line[256];
    FILE *file = fopen(getenv("NVML_STAND_IN"), "r");
    memset(gpus, 0, sizeof gpus);
    count = init_code = rates_code = samples_code = 0;
    while (fgets(line, sizeof line, file)) {
        u a; ull b; int c;
        if (sscanf(line, "gpu %u %llu", &a, &b) == 2) {
            gpus[count].busy = a;
            gpus[count++].used = b;
        } else if (sscanf(line, "process %u %llu %d", &a, &b, &c) == 3) {
            u at = gpus[count - 1].processes++;
            gpus[count - 1].process[at] = (Process){a, b, ~0u, ~0u};
            gpus[count - 1].sm[at] = c;
        }
        sscanf(line, "init %d", &init_code);
        sscanf(line, "rates %d", &rates_code);
        sscanf(line, "samples %d", &samples_code);
    }
    fclose(file);
}

int nvmlInit_v2(void) { read_facts(); return init_code; }
int nvmlDeviceGetCount_v2(u *found) { read_facts(); *found = count; return 0; }
int nvmlDeviceGetHandleByIndex_v2(u index, void **gpu) { *gpu = &gpus[index]; return index < count ? 0 : 2; }
#define GPU (&gpus[((char *)gpu - (char *)gpus) / sizeof gpus[0]])

int nvmlDeviceGetUtilizationRates(void *gpu, Rates *rates) {
    *rates = (Rates){GPU->busy, 0};
    return rates_code;
}
int nvmlDeviceGetMemoryInfo(void *gpu, Memory *memory) {
    *memory = (Memory){80ull << 30, 0, GPU->used};
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, u *room, Process *found) {
    u had = *room;
    *room = GPU->processes;
    if (had < GPU->processes) return 7;
    memcpy(found, GPU->process, GPU->processes * sizeof *found);
    return 0;
}
int nvmlDeviceGetProcessUtilization(void *gpu, Sample *found, u *room, ull since) {
    ull now = (ull)time(NULL) * 1000000;
    ull ages[] = {1000000, 1500000, 60000000};
    Sample all[3 * 256];
    u had = *room, some = 0;
    if (samples_code) return samples_code;
    for (int age = 0; age < 3; age++)  /* the newest is right */
        for (u i = 0; i < GPU->processes; i++)
            if (GPU->sm[i] > 0 && now - ages[age] > since)
                all[some++] = (Sample){GPU->process[i].pid, now - ages[age], age ? 99 : GPU->sm[i], 0, 0, 0};
    *room = some;
    if (had < some || had < 72) {  /* as an H200's driver does */
        *room = some < 72 ? 72 : some;
        return 7;
    }
    if (!some) return 6;
    memcpy(found, all, some * sizeof *found);
    return 0;
}
"""


def forget() -> None:
    """What this process has found out about the library."""
    gpus._library.cache_clear()
    gpus._initialised.cache_clear()


class Gpu(NamedTuple):
    percent: int
    processes: Sequence[tuple[int, int, int]] = ()
    """The pid of each, its bytes, and to how many percent it keeps the GPU busy."""
    used: int = 0
    """Bytes."""


class StandIn:
    """The library, in a folder of its own, and what it reports."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.library = folder / "libnvidia-ml.so.1"
        self._facts = folder / "facts"
        source = folder / "nvml.c"
        source.write_text(_SOURCE)
        command = ["gcc", "-shared", "-fPIC", "-o", str(self.library), str(source)]
        subprocess.run(command, check=True)
        self.reports()

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that finds it."""
        return {"LD_LIBRARY_PATH": str(self.library.parent), "NVML_STAND_IN": str(self._facts)}

    @contextmanager
    def in_this_process(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpus, "_LIBRARY", str(self.library))
            patch.setenv("NVML_STAND_IN", str(self._facts))
            forget()
            yield
        forget()

    def reports(self, *found: Gpu, **codes: int) -> None:
        """These GPUs; ``codes``: what functions return."""
        lines = [f"{name} {code}" for name, code in codes.items()]
        for gpu in found:
            lines.append(f"gpu {gpu.percent} {gpu.used}")
            lines += [f"process {pid} {size} {percent}" for pid, size, percent in gpu.processes]
        self._facts.write_text("\n".join(lines))

    @contextmanager
    def not_answering(self) -> Iterator[None]:
        """What is asked in here gets no answer before the end."""
        facts, gate = self._facts.read_text(), self._facts.with_name("gate")
        self._facts.unlink()
        os.mkfifo(self._facts)
        try:
            yield
        finally:
            self._facts.rename(gate)
            self._facts.write_text(facts)
            os.close(os.open(gate, os.O_RDWR))
            gate.unlink()
