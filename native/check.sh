#!/bin/sh
# Build and run the native tests, without Python.
#
#   native/check.sh [plain] [address] [thread] [posix]     all four when none is named
#
# plain    release build, both backends
# address  AddressSanitizer and UndefinedBehaviorSanitizer
# thread   ThreadSanitizer
# posix    release build without io_uring: what `make URING=off` builds
#
# The tests write a few hundred MB to TMPDIR (or /tmp); O_DIRECT is tested where it is allowed there.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
[ $# -gt 0 ] || set -- plain address thread posix
for kind in "$@"; do
    case $kind in
        plain) options="-DFLOWSTONE_URING=ON" ;;
        posix) options="-DFLOWSTONE_URING=OFF" ;;
        address | thread) options="-DFLOWSTONE_URING=ON -DFLOWSTONE_SANITIZE=$kind" ;;
        *) echo "check.sh: unknown build '$kind' (plain, address, thread, posix)" >&2; exit 2 ;;
    esac
    build="$root/build/native-$kind"
    # shellcheck disable=SC2086  # no option holds a space
    cmake -S "$root" -B "$build" -DFLOWSTONE_NATIVE_TESTS=ON -DFLOWSTONE_WERROR=ON $options >/dev/null
    cmake --build "$build" --parallel 2
    echo "== $kind"
    if [ "$kind" = thread ]; then
        # ThreadSanitizer of older compilers does not know newer kernels' address layout.
        setarch -R "$build/flowstone_tests"
    else
        "$build/flowstone_tests"
    fi
done
