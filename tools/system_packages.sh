#!/bin/sh
# Install the named Debian packages that are missing, if that can be done here; else say what to do.
#   URING=off: liburing-dev is not needed
set -eu

present() { # the header or program that a package is wanted for, whoever installed it
    case $1 in
    liburing-dev) echo '#include <liburing.h>' | c++ -E -x c++ - >/dev/null 2>&1 ;;
    libxxhash-dev) echo '#include <xxhash.h>' | c++ -E -x c++ - >/dev/null 2>&1 ;;
    libzstd-dev) echo '#include <zstd.h>' | c++ -E -x c++ - >/dev/null 2>&1 ;;
    doctest-dev) echo '#include <doctest/doctest.h>' | c++ -E -x c++ - >/dev/null 2>&1 ;;
    *) command -v "$1" >/dev/null 2>&1 ;;
    esac
}

missing=
for package in "$@"; do
    [ "$package" = liburing-dev ] && [ "${URING:-auto}" = off ] && continue
    present "$package" || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if command -v apt-get >/dev/null 2>&1; then
    as_root=
    [ "$(id -u)" = 0 ] || as_root="sudo -n"
    echo "installing system packages:$missing"
    # shellcheck disable=SC2086
    if $as_root apt-get update -qq && $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $missing >/dev/null; then
        exit 0
    fi
fi
cat >&2 <<END
These system packages are needed and could not be installed from here:$missing
  Debian, Ubuntu:  sudo apt-get install$missing
  Fedora, RHEL:    sudo dnf install liburing-devel xxhash-devel libzstd-devel doctest-devel fio
  without io_uring: make URING=off ...   (the POSIX engine; liburing is not needed then)
END
exit 1
