#!/bin/bash
# A whole Debian with a systemd of its own as process 1, in namespaces, and the life of the package there: installed, at work, upgraded
# under load, killed, stopped, purged. What came of it is told in lines "TOLD name value".
#   machine.sh FOLDER ROOT_TAR OLD_DEB NEW_DEB FAKE_LLAMA MODEL
set -u
folder=${1:-} tar=${2:-}
told() { echo "TOLD $*"; }
until_so() { for _ in $(seq 300); do "$@" && return 0; sleep 0.1; done; return 1; }

if [ -z "${STAGE:-}" ]; then
    # What is mounted is seen by this script alone, and gone with it.
    STAGE=host exec unshare --mount --propagation private bash "$0" "$@"
fi

if [ "$STAGE" = host ]; then
    root="$folder/machine" groups="$folder/groups"
    mkdir -p "$root" "$groups" && tar -C "$root" -xf "$tar" --exclude='./dev/*' && cp "$3" "$root/old.deb" && cp "$4" "$root/new.deb" &&
        cp "$6" "$root/tiny.gguf" && install -m 755 "$5" "$root/usr/local/bin/llama-server" && cp "$0" "$root/steps" || exit 1
    # A control group of our own, so that what systemd makes is beneath it.
    own="$groups/llama-warden-machine-$$"
    mount -t cgroup2 none "$groups" && mkdir "$own" || { told skipped no control groups; exit 0; }
    # It ends with this script, however that ends, and all that it started with it.
    (
        echo "$BASHPID" >"$own/cgroup.procs" &&
            STAGE=boot exec setpriv --pdeathsig KILL unshare --mount --pid --fork --ipc --uts --net --cgroup --kill-child bash "$0" "$root" </dev/null >"$folder/boot.log" 2>&1
    ) &
    boot=$!
    within() { nsenter --target "$(pgrep -P "$boot")" --all --root env -i -C / PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin STAGE=steps "$@"; }
    up() { within systemctl is-system-running 2>/dev/null | grep -qE 'running|degraded'; }
    refused() { ! kill -0 "$boot" 2>/dev/null; }
    until_so eval 'up || refused'
    if up; then within bash /steps; elif refused; then told skipped no namespaces: "$(tail -n 3 "$folder/boot.log")"; else told never up: "$(tail -n 3 "$folder/boot.log")"; fi
    kill -9 "$boot" 2>/dev/null
    wait "$boot" 2>/dev/null
    for _ in $(seq 100); do
        find "$own" -depth -type d -exec rmdir {} + 2>/dev/null
        [ -d "$own" ] || break
        sleep 0.1
    done
    exit 0
fi

if [ "$STAGE" = boot ]; then
    root=$1
    # The settings of the kernel are everybody's: nothing in here may write them.
    mount --make-rprivate / && mount --bind "$root" "$root" && mount -t proc proc "$root/proc" && mount -t sysfs -o ro sysfs "$root/sys" &&
        mount --bind "$root/proc/sys" "$root/proc/sys" && mount -o remount,bind,ro "$root/proc/sys" &&
        mount --bind "$root/proc/sysrq-trigger" "$root/proc/sysrq-trigger" && mount -o remount,bind,ro "$root/proc/sysrq-trigger" &&
        { [ -d "$root/sys/fs/cgroup" ] && mount -t cgroup2 none "$root/sys/fs/cgroup"; } &&
        mount -t tmpfs none "$root/run" && mount -t tmpfs none "$root/tmp" && mount -t tmpfs none "$root/dev" || exit 1
    for device in null zero full random urandom tty; do
        touch "$root/dev/$device" && mount --bind "/dev/$device" "$root/dev/$device"
    done
    mkdir "$root/dev/shm" "$root/dev/pts" && ln -s /proc/self/fd "$root/dev/fd"
    ip link set lo up 2>/dev/null
    cd "$root" || exit 1
    exec chroot . /usr/bin/env -i container=llama-warden-test /lib/systemd/systemd --system --unit=multi-user.target
fi

# Within.
unit=llama-warden.service
asked() { systemctl show -p "$1" --value "$unit"; }
is() { [ "$(asked "$1")" = "$2" ]; }
servers() { pgrep -u llama-warden -x llama-server | sort | tr '\n' ' '; }
chat() { curl -sf -m 60 -N http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' -d "$1"; }
short='{"model":"tiny","messages":[{"role":"user","content":"hello"}],"max_tokens":3}'
stream='{"model":"tiny","stream":true,"messages":[{"role":"user","content":"hello"}],"max_tokens":40}'
answered() { chat "$short" | grep -q '"chat.completion"'; }
ip link set lo up 2>/dev/null

dpkg -i /old.deb >/tmp/dpkg 2>&1 && told installed "$(dpkg-query -W -f '${Version}' llama-warden)"
told enabled "$(systemctl is-enabled $unit)" "$(asked ActiveState)" as "$(ps -o user:20= -p "$(asked MainPID)")"
install -o llama-warden -g llama-warden /tiny.gguf /var/lib/llama-warden/models/
until_so answered && told answers
told exposed "$(systemd-analyze security $unit 2>/dev/null | tail -n 1 | grep -o '[0-9][0-9.]*' | head -n 1)"

# Upgraded by dpkg while eight clients ask, half of them for streams.
first=$(asked MainPID) run=$(asked InvocationID) before=$(servers)
for client in 1 2 3 4 5 6 7 8; do
    (
        while [ ! -e /tmp/over ]; do
            if [ $((client % 2)) = 0 ]; then chat "$stream" | grep -q '\[DONE\]'; else answered; fi && echo whole || echo failed
        done >/tmp/client-$client
    ) &
done
until_so eval '[ "$(cat /tmp/client-* | wc -l)" -ge 40 ]'
dpkg -i /new.deb >>/tmp/dpkg 2>&1 && told upgraded "$(dpkg-query -W -f '${Version}' llama-warden)"
grep -q 'goes on as it was' /tmp/dpkg && told refused
seen=$(cat /tmp/client-* | wc -l)
until_so eval '[ "$(cat /tmp/client-* | wc -l)" -ge $((seen + 40)) ]'
touch /tmp/over && wait
told failed "$(cat /tmp/client-* | grep -c failed)"
[ "$(asked NRestarts) $(asked MainPID) $(asked InvocationID) $(servers)" = "0 $first $run $before" ] && told same

# It dies: its children die with it, and systemd starts it anew.
kill -9 "$first"
until_so eval 'is NRestarts 1 && is ActiveState active' && until_so answered && told anew
for server in $before; do kill -0 "$server" 2>/dev/null && told left "$server"; done

# It dies, and the folder of its models comes late, as from a mount: however often it fails, it is started once more.
state=/var/lib/llama-warden
mv $state/models $state/late && kill -9 "$(asked MainPID)"
until_so eval '[ "$(asked NRestarts)" -ge 7 ]' && mv $state/late $state/models && until_so answered && told patient

systemctl stop $unit && told stopped "$(asked ActiveState)" "$(asked Result)" "$(pgrep -u llama-warden | wc -l)" left
journalctl --no-pager -q -o cat _SYSTEMD_UNIT=$unit MODEL=tiny | grep -q 'ready after' && told journal

# Removed and installed again it serves, and what its user has put there meanwhile is given to nobody.
dpkg --remove llama-warden >>/tmp/dpkg 2>&1
mkdir /somebodys && runuser -u llama-warden -- sh -c "mv $state/models $state/kept && ln -s /somebodys $state/models"
dpkg -i /new.deb >>/tmp/dpkg 2>&1 && told again "$(asked ActiveState)" "$(stat -c '%U %a' /somebodys)"
systemctl stop $unit && rm $state/models && mv $state/kept $state/models
dpkg --purge llama-warden >>/tmp/dpkg 2>&1 && told purged "$(systemctl list-unit-files 'llama-warden*' --no-legend | wc -l)" "$(ls /var/lib/llama-warden/models)"
[ -d /etc/llama-warden ] || [ -d /var/log/llama-warden ] || told nothing_left
cat /tmp/dpkg >&2
