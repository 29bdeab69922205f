#!/usr/bin/env bash
# attention_layer.py with its two ranks on two "machines": network namespaces with a link of RATE each way.
#
#     benchmarks/slow_link.sh --preset deepseek-v2-lite --tokens 4096 --dtype bf16 --json
#     RATE=10gbit PYTHON=.venv/bin/python benchmarks/slow_link.sh
#
# Arguments are attention_layer.py's; stdout is rank 0's. Needs root and iproute2, and a kernel with network namespaces,
# veth and tbf. Both ends of the link are made inside the namespaces, so the host's own network is not touched, and both
# are gone at the end. What the link carries is measured first, one direction after the other, and told on stderr; a
# link faster than RATE is refused. (tc -s -n NAMESPACE qdisc shows what was held back, while it runs.)
set -u

RATE=${RATE:-1gbit}
PYTHON=${PYTHON:-python}
PORT=29500
NAMESPACES=("slow_link_$$_0" "slow_link_$$_1")
DEVICES=(veth0 veth1)
# Of a range for documentation: inside the namespaces nobody else has it.
ADDRESSES=(192.0.2.1 192.0.2.2)

stop() {
    echo "slow_link.sh: $1" >&2
    exit 1
}

need() { # what, command...: runs the command, and stops with its complaint if it fails
    local what=$1 said
    shift
    said=$("$@" 2>&1) || stop "needs $what, but '$*' failed: ${said//$'\n'/ }"
}

clean_up() {
    trap '' INT TERM USR1
    local namespace
    for namespace in "${made[@]}"; do
        # A namespace lives as long as a process in it. None has anything to finish.
        ip netns pids "$namespace" | xargs --no-run-if-empty kill -KILL
        ip netns delete "$namespace"
    done
    wait
}

carries() { # from, to: Mbit/s over the link, once the first burst is through
    ip netns exec "${NAMESPACES[$2]}" "$PYTHON" -c '
import socket, time
socket.setdefaulttimeout(10)
link, _ = socket.create_server(("", '$PORT')).accept()
room = bytearray(1 << 20)
def received(seconds):
    begin, count = time.perf_counter(), 0
    while (now := time.perf_counter()) < begin + seconds:
        count += link.recv_into(room)
    return 8e-6 * count / (now - begin)
received(0.1)
print(round(received(0.3)))' &
    ip netns exec "${NAMESPACES[$1]}" "$PYTHON" -c '
import contextlib, socket, time
deadline = time.monotonic() + 10
while True:
    try:
        link = socket.create_connection(("'"${ADDRESSES[$2]}"'", '$PORT'))
        break
    except OSError:  # the other one does not listen yet
        if time.monotonic() > deadline:
            raise
        time.sleep(0.01)
with contextlib.suppress(OSError):  # the other one has seen enough
    while True:
        link.sendall(bytes(1 << 20))'
    wait $!
}

run_rank() { # rank, arguments: if it fails it ends all, for the other one would wait for it
    RANK=$1 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=${ADDRESSES[0]} MASTER_PORT=$PORT GLOO_SOCKET_IFNAME=${DEVICES[$1]} \
        ip netns exec "${NAMESPACES[$1]}" "$PYTHON" "$folder/attention_layer.py" "${@:2}" && return
    kill -USR1 $$
    return 1
}

for tool in ip tc; do
    command -v $tool >/dev/null || stop "needs iproute2, but there is no '$tool' in PATH: apt install iproute2."
done
((EUID == 0)) || stop "needs root, to make network namespaces, and you are user $EUID: run it with sudo."
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) || exit

made=()
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 1' USR1

for namespace in "${NAMESPACES[@]}"; do
    need "network namespaces" ip netns add "$namespace"
    made+=("$namespace")
done
need "veth in the kernel" ip link add "${DEVICES[0]}" netns "${NAMESPACES[0]}" type veth \
    peer name "${DEVICES[1]}" netns "${NAMESPACES[1]}"
for end in 0 1; do
    inside=(-n "${NAMESPACES[end]}")
    # The least burst that lets the kernel's packets of 64 KiB through whole: a longer one would be a part of each
    # exchange that is sent at once.
    need "tbf in the kernel and a rate that tc knows" \
        tc "${inside[@]}" qdisc add dev "${DEVICES[end]}" root tbf rate "$RATE" burst 80kb latency 50ms
    need "addresses" ip "${inside[@]}" address add "${ADDRESSES[end]}/30" dev "${DEVICES[end]}"
    need "a link" ip "${inside[@]}" link set "${DEVICES[end]}" up
    need "loopback" ip "${inside[@]}" link set lo up
done

# What tc made of RATE, in its own unit: bytes a second.
limit=$(tc -j -n "${NAMESPACES[0]}" qdisc show dev "${DEVICES[0]}" | grep -o '"rate":[0-9]*' | cut -d: -f2)
there=$(carries 0 1) && back=$(carries 1 0) || stop "nothing came over the link."
echo "slow_link.sh: the link carries $there Mbit/s there and $back back, $((limit * 8 / 1000000)) asked for" >&2
for measured in $there $back; do
    ((measured * 1000000 <= limit * 8 * 11 / 10)) || stop "the link is not shaped to $RATE."
done

run_rank 1 "$@" >/dev/null &
second=$!
run_rank 0 "$@" &
first=$!
wait $second && wait $first
