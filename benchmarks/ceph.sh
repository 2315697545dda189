#!/usr/bin/env bash
# One-node Ceph with an S3 gateway, for benchmarks, on Debian and its relatives.
#
#   ceph.sh start DIR S3_PORT MON_PORT TLS_PORT
#                                         unpack Debian's packages below DIR (first time: 66 MiB of downloads), start
#   ceph.sh gateway DIR                   start the gateway again after it was killed
#   ceph.sh stop DIR                      end what was started from DIR
#
# Nothing is installed, nothing listens beyond 127.0.0.1, all state lies below DIR. Two users:
# writer/writer-secret may do everything, reader/reader-secret only reads (what bucket policies let it see).
# One copy of the data in one sparse file, no authentication inside the cluster: for measuring, not for keeping.
set -euo pipefail

action=${1:?start or stop}
mkdir -p "${2:?folder}"
home=$(cd "$2" && pwd)
unpacked=$home/unpacked state=$home/state
libraries=$unpacked/usr/lib/$(uname -m)-linux-gnu
daemons=(client.rgw.s3 osd.0 mon.a)

stop() {
    local daemon pid
    for daemon in "${daemons[@]}"; do
        pid=$(cat "$state/$daemon.pid" 2>/dev/null) || continue
        kill "$pid" 2>/dev/null || continue
        for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
        kill -9 "$pid" 2>/dev/null || true
    done
}

unpack() {
    [ -e "$unpacked/complete" ] && return
    mkdir -p "$home/packages" "$unpacked"
    local wanted
    wanted=$(apt-get install --simulate --no-install-recommends ceph-mon ceph-osd radosgw ceph-common |
        awk '/^Inst/ {print $2}')
    [ -n "$wanted" ] || { echo "apt names no packages to unpack; is Ceph installed here already?" >&2; return 1; }
    # shellcheck disable=SC2086
    (cd "$home/packages" && apt-get download -qq $wanted)
    for package in "$home"/packages/*.deb; do dpkg -x "$package" "$unpacked"; done
    rm -r "$home/packages"
    touch "$unpacked/complete"
}

write_configuration() {
    cat >"$CEPH_CONF" <<END
[global]
fsid = $cluster
mon initial members = a
mon host = [v1:127.0.0.1:$mon_port]
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
mon allow pool size one = true
mon max pg per osd = 1000
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
pid file = $state/\$name.pid
log file = $state/\$name.log
admin socket = $state/\$name.asok
run dir = $state
keyring = $state/keyring
plugin dir = $libraries/ceph
erasure code dir = $libraries/ceph/erasure-code
osd class dir = $libraries/rados-classes
[mon.a]
mon data = $state/mon
mon data avail warn = 1
mon data avail crit = 1
[osd.0]
osd data = $state/osd
osd objectstore = bluestore
bluestore block size = 25769803776
bluestore block db create = false
bluestore block wal create = false
osd memory target = 1500000000
[client.rgw.s3]
rgw data = $state/gateway
rgw frontends = beast endpoint=127.0.0.1:$s3_port ssl_endpoint=127.0.0.1:$tls_port ssl_certificate=$state/certificate.pem ssl_private_key=$state/key.pem
rgw gc obj min wait = 1
rgw gc processor period = 2
END
}

set_paths() {
    export LD_LIBRARY_PATH=$libraries:$unpacked/lib/$(uname -m)-linux-gnu:$libraries/ceph
    export PATH=$unpacked/usr/bin:$PATH PYTHONPATH=$unpacked/usr/lib/python3/dist-packages
    export CEPH_CONF=$state/ceph.conf
}

start() {
    unpack
    set_paths
    rm -rf "$state"
    mkdir -p "$state"/{mon,osd,gateway}
    touch "$state/keyring"
    local cluster identity
    cluster=$(cat /proc/sys/kernel/random/uuid)
    identity=$(cat /proc/sys/kernel/random/uuid)
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 30 -subj /CN=benchmark \
        -addext subjectAltName=IP:127.0.0.1 -keyout "$state/key.pem" -out "$state/certificate.pem"
    write_configuration
    monmaptool --create --addv a "[v1:127.0.0.1:$mon_port]" --fsid "$cluster" "$state/monmap"
    ceph-mon -i a --mkfs --monmap "$state/monmap" --keyring "$state/keyring"
    ceph-mon -i a
    patiently timeout 20 /usr/bin/python3 "$unpacked/usr/bin/ceph" osd new "$identity"
    ceph-osd -i 0 --mkfs --osd-uuid "$identity"
    patiently ceph-osd -i 0
    create_user writer read,write,delete
    create_user reader read
    radosgw -n client.rgw.s3
    for _ in $(seq 120); do
        curl --silent --output /dev/null --max-time 2 "http://127.0.0.1:$s3_port/" && return
        sleep 0.25
    done
    echo "the gateway does not answer" >&2
    return 1
}

# Clients of the monitor may ask before they know its cluster id ("wrong fsid"); asking again helps.
patiently() {
    for _ in $(seq 10); do "$@" && return; sleep 1; done
    return 1
}

create_user() {
    patiently timeout 120 radosgw-admin -n client.rgw.s3 user create --uid="$1" --display-name="$1" \
        --access-key="$1" --secret-key="$1-secret" --op-mask="$2"
}

case $action in
start)
    s3_port=${3:?S3 port} mon_port=${4:?monitor port} tls_port=${5:?port for TLS}
    stop
    (start) >"$home/start.log" 2>&1 &
    wait $! && exit
    echo "Ceph did not start; more in $home/start.log and $state" >&2
    tail -n 5 "$home/start.log" >&2
    stop
    exit 1
    ;;
gateway)
    set_paths
    radosgw -n client.rgw.s3
    ;;
stop) stop ;;
*) echo "usage: ceph.sh start DIR S3_PORT MON_PORT TLS_PORT | gateway DIR | stop DIR" >&2; exit 2 ;;
esac
