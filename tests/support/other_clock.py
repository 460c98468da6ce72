"""A clock that is days off, for a process and its children: a preloaded library changes the C library's answer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

DAY_S = 86_400

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long off_s(void) {
    const char *text = getenv("OTHER_CLOCK_S");
    return text == NULL ? 0 : atol(text);
}

int clock_gettime(clockid_t id, struct timespec *found) {
    static int (*real)(clockid_t, struct timespec *);
    if (real == NULL) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const int result = real(id, found);
    if (result == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) found->tv_sec += off_s();
    return result;
}

int gettimeofday(struct timeval *restrict found, void *restrict zone) {
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now) != 0) return -1;
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found != NULL) *found = now.tv_sec;
    return now.tv_sec;
}
"""


def compiler() -> str | None:
    return shutil.which("cc")


def environment(directory: Path, off_s: int) -> dict[str, str]:
    """The environment that gives a process that clock. The library is made in `directory`."""
    library = directory / "other_clock.so"
    if not library.exists():
        result = compiler()
        assert result is not None, "ask first"
        (directory / "other_clock.c").write_text(_SOURCE)
        subprocess.run(
            [result, "-O1", "-shared", "-fPIC", "-o", library, directory / "other_clock.c", "-ldl"], check=True
        )
    return {"LD_PRELOAD": str(library), "OTHER_CLOCK_S": str(off_s)}
