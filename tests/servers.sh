#!/usr/bin/env bash
# What tests/remotes needs of the system: a Redis server, the libraries of Mooncake's programs, and
# what makes network namespaces.
# Usage: servers.sh BIN, the folder of the environment's programs. Never fails: where they cannot be
# installed, the tests of those remotes are skipped, and say so.
set -u
bin=$1

missing() {
    command -v redis-server redis-check-rdb >/dev/null || return 0
    command -v ip >/dev/null && command -v tc >/dev/null || return 0
    for library in libcurl.so.4 libibverbs.so.1 librdmacm.so.1 libnuma.so.1; do
        ldconfig -p | grep -q "$library" || return 0
    done
    return 1
}

as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"; else sudo -n "$@"; fi
}

# redis-tools has the whole server under another name, and, unlike redis-server, starts no service.
install() {
    export DEBIAN_FRONTEND=noninteractive
    as_root apt-get update -qq
    as_root apt-get install -qq -y --no-install-recommends \
        redis-tools libcurl4 libibverbs1 librdmacm1 libnuma1 iproute2
}

if [ "$(uname)" = Linux ] && missing; then
    if command -v apt-get >/dev/null && as_root true 2>/dev/null; then
        install >/dev/null 2>&1
    fi
    missing && echo "servers.sh: no Redis server, libraries of Mooncake or ip and tc here: tests are skipped"
fi
if ! command -v redis-server >/dev/null && command -v redis-check-rdb >/dev/null; then
    ln -sf "$(command -v redis-check-rdb)" "$bin/redis-server"
fi
exit 0
