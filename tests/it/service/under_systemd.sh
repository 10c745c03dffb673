#!/bin/bash
# A systemd and a journald of our own in namespaces of their own, and the program as a service of theirs. What came of it is told in
# lines "TOLD name value".
#   under_systemd.sh FOLDER LLAMA_WARDEN FAKE_LLAMA
folder=$1 warden=$2 fake=$3
if [ -z "${INSIDE:-}" ]; then
    # A control group of our own, so that what systemd makes is beneath it.
    groups="$folder/groups" && mkdir -p "$groups" && mount -t cgroup2 none "$groups" || { echo "TOLD skipped no control groups"; exit 0; }
    own="$groups/llama-warden-test-$$"
    mkdir -p "$own" && (
        echo "$BASHPID" >"$own/cgroup.procs" &&
            INSIDE=1 exec unshare --mount --pid --fork --mount-proc --cgroup --kill-child bash "$0" "$@"
    )
    rc=$?
    for _ in $(seq 50); do
        find "$own" -depth -type d -exec rmdir {} + 2>/dev/null
        [ -d "$own" ] || break
        sleep 0.1
    done
    umount "$groups"
    exit $rc
fi

mount --make-rprivate / && mount -t tmpfs none /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup && mount -t tmpfs none /run ||
    { echo "TOLD skipped no mounts"; exit 0; }
mkdir -p /run/systemd/system /run/user/0 /run/log/journal "$folder/home"
export XDG_RUNTIME_DIR=/run/user/0 HOME="$folder/home" XDG_CONFIG_HOME="$folder/home/.config"
until_so() { for _ in $(seq 200); do "$@" && return 0; sleep 0.1; done; return 1; }
/lib/systemd/systemd-journald >/dev/null 2>&1 &
until_so test -S /run/systemd/journal/socket || { echo "TOLD skipped no journald"; exit 0; }
/lib/systemd/systemd --user >/dev/null 2>&1 &
until_so systemctl --user list-units >/dev/null 2>&1 || { echo "TOLD skipped no systemd"; exit 0; }

told() { echo "TOLD $*"; }
asked() { systemctl --user show -p "$1" --value "${2:-llama-warden.service}"; }
is() { [ "$(asked "$1")" = "$2" ]; }
port=$4
chat() { curl -s -m 60 -N "http://127.0.0.1:$port/v1/chat/completions" -H 'content-type: application/json' -d "$1"; }
short='{"model":"m","messages":[{"role":"user","content":"hello"}],"max_tokens":3}'
long='{"model":"m","stream":true,"messages":[{"role":"user","content":"hello"}],"max_tokens":300}'

cat >"$folder/warden.toml" <<T
server.port = $port
server.shutdown_deadline = "50s"
[models.m]
binary = "$fake"
model = "$folder/m.gguf"
preload = true
args = ["-np", "4", "--metrics"]
env = { FAKE_LLAMA_SCRIPT = "$folder/script.json" }
T
echo GGUF >"$folder/m.gguf"
echo '{"ms_per_token": 10}' >"$folder/script.json"
"$warden" service install --user --socket --config "$folder/warden.toml"
drop="$XDG_CONFIG_HOME/systemd/user/llama-warden.service.d"
mkdir -p "$drop"
printf '[Service]\nWatchdogSec=6\nEnvironment=LLAMA_WARDEN_CHILD__MEASURE=false\n' >"$drop/test.conf"
systemctl --user daemon-reload

# On demand: the socket listens, and the first who connects waits for the start.
systemctl --user start llama-warden.socket
told before "$(asked ActiveState)"
chat "$short" | grep -q '"chat.completion"' && told on_demand answered
told after "$(asked ActiveState)" "$(asked SubState)"
until_so eval 'asked StatusText | grep -q "1 of 1 models ready"' && told status "$(asked StatusText)"

systemctl --user reload llama-warden.service
until_so eval 'is ActiveState active && asked StatusText | grep -q "1 of 1"' && told reloaded yes
first=$(asked MainPID)

# Fed: it lives on for longer than the watchdog's time. Stopped as a whole: it is ended and started anew, with its children.
sleep 10
is MainPID "$first" && told fed yes
child=$(pgrep -P "$first")
kill -STOP "$first"
until_so eval 'is NRestarts 1 && is ActiveState active' && told watchdog restarted
kill -0 "$child" 2>/dev/null || told children gone
chat "$short" | grep -q '"chat.completion"' && told anew answered

# Stopped with a stream in flight: the stream ends as it should, then the service.
chat "$long" >"$folder/stream" &
until_so eval 'asked StatusText | grep -q "1 requests in flight"' && told in_flight yes
systemctl --user stop llama-warden.service 2>/dev/null
wait $!
grep -q '\[DONE\]' "$folder/stream" && told stream whole
told stopped "$(asked ActiveState)" "$(asked Result)"

told journal "$(journalctl --no-pager -q -o cat TARGET=event MODEL=m GENERATION=1 | grep -c 'event: ready after')"
told journal_of_children "$(journalctl --no-pager -q -o cat TARGET=llama_server MODEL=m GENERATION=1 | grep -c 'model loaded')"
systemctl --user stop llama-warden.socket
"$warden" service uninstall --user
told uninstalled "$(find "$XDG_CONFIG_HOME/systemd/user" -maxdepth 1 -name 'llama-warden*' ! -name '*.d' | wc -l)"
