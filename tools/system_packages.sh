#!/bin/sh
# Install the named Debian packages that are missing, if that can be done here; else say what to do.
set -eu

present() { # the header or program that a package is wanted for, whoever installed it
    case $1 in
    doctest-dev) echo '#include <doctest/doctest.h>' | c++ -E -x c++ - >/dev/null 2>&1 ;;
    *) command -v "$1" >/dev/null 2>&1 ;;
    esac
}

missing=
for package in "$@"; do
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
  Fedora, RHEL:    sudo dnf install doctest-devel fio
END
exit 1
