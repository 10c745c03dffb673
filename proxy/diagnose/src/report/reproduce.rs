//! A script that shows the growth without us: POSIX sh, curl, a plain llama-server, and Linux's /proc; nvidia-smi where
//! there is one. With the requests beside it.

use serde_json::Value;
use warden_policies::experiment::{Finding, Workload};

use super::{About, HIDDEN, quoted};
use crate::workload::{Facts, Script};
use warden_policies::defaults::Diagnose;

/// Requests that the script sends in turn, at most.
const MOST: usize = 16;
/// In a request: the number of the request, so that no text is the same as one before.
const NUMBER: &str = "@N@";

/// A request of the script.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Request {
    /// Where it goes.
    path: String,
    /// What it says.
    pub(crate) body: String,
}

/// The requests of a workload, as far as they do not depend on answers.
pub(crate) fn requests(
    workload: Workload,
    numbers: &Diagnose,
    slots: u32,
    n_ctx: Option<u64>,
) -> Vec<Request> {
    let facts = Facts { slots, n_ctx, tokens_per_word: 0.0 };
    let Ok(mut script) = Script::new(workload, numbers, facts, None) else { return Vec::new() };
    let mut all: Vec<Request> = Vec::new();
    // The first is a warm-up.
    drop(script.next());
    for _ in 0..MOST {
        for ask in script.next() {
            let Some(mut body) = ask.body else { continue };
            number(&mut body);
            let request = Request { path: ask.path, body: body.to_string() };
            if !all.contains(&request) {
                all.push(request);
            }
        }
    }
    all.truncate(MOST);
    all
}

/// Puts the number of the request before the last text in it.
fn number(body: &mut Value) {
    if let Some(Value::String(text)) = body.get_mut("prompt") {
        text.insert_str(0, &format!("{NUMBER} "));
        return;
    }
    let Some(message) = body.get_mut("messages").and_then(Value::as_array_mut).and_then(|all| all.last_mut())
    else {
        return;
    };
    let text = match message.get_mut("content") {
        Some(Value::String(text)) => Some(text),
        Some(Value::Array(parts)) => parts.iter_mut().find_map(|part| match part.get_mut("text") {
            Some(Value::String(text)) => Some(text),
            _ => None,
        }),
        _ => None,
    };
    if let Some(text) = text {
        text.insert_str(0, &format!("{NUMBER} "));
    }
}

/// Flags and values without secrets: what is hidden cannot be given.
fn arguments(about: &About) -> String {
    let mut words: Vec<String> = Vec::new();
    for word in &about.args {
        if word == HIDDEN {
            words.pop();
        } else {
            words.push(quoted(word));
        }
    }
    words.join(" ")
}

/// The script. `finding`: what it is to show; `removed`: variables that the server must not inherit.
pub(crate) fn script(about: &About, finding: &Finding, requests: &[Request], removed: &[String]) -> String {
    let shown: Vec<String> = finding
        .series
        .iter()
        .filter_map(|found| {
            let rate = found.per_request?.value / 1024.0;
            Some(format!("#   {}: {}, {rate:+.0} KiB a request", found.series, found.verdict.as_str()))
        })
        .collect();
    let exports: Vec<String> = about
        .env
        .iter()
        .filter(|(name, value)| value != HIDDEN && is_name(name))
        .map(|(name, value)| format!("export {name}={}\n", quoted(value)))
        .collect();
    let unset: Vec<String> =
        removed.iter().filter(|name| is_name(name)).map(|name| format!("unset {name}\n")).collect();
    let paths: Vec<String> = requests
        .iter()
        .enumerate()
        .map(|(at, request)| format!("    {at}) path={} ;;\n", quoted(&request.path)))
        .collect();
    TEMPLATE
        .replace("@WORKLOAD@", finding.workload.as_str())
        .replace("@SHOWN@", &shown.join("\n"))
        .replace("@REQUESTS@", &finding.requests.max(1).to_string())
        .replace("@BINARY@", &quoted(&about.binary))
        .replace("@EXPORTS@", &exports.concat())
        .replace("@UNSET@", &unset.concat())
        .replace("@ARGS@", &arguments(about))
        .replace("@BODIES@", &requests.len().to_string())
        .replace("@PATHS@", &paths.concat())
}

fn is_name(name: &str) -> bool {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') && name.chars().all(word)
}

const TEMPLATE: &str = r#"#!/bin/sh
# Shows how the memory of llama-server grows under the workload @WORKLOAD@, with nothing but llama-server, curl and a shell.
# Seen with llama-warden diagnose:
@SHOWN@
#
#   sh reproduce.sh [REQUESTS]
#
# LLAMA_SERVER is the binary to use, PORT the port (18080).
set -eu
server=${LLAMA_SERVER:-@BINARY@}
port=${PORT:-18080}
requests=${1:-@REQUESTS@}
here=$(cd "$(dirname "$0")" && pwd)
log=$(mktemp)

@EXPORTS@@UNSET@"$server" @ARGS@ --host 127.0.0.1 --port "$port" >"$log" 2>&1 &
pid=$!
trap 'kill "$pid" 2>/dev/null || :; rm -f "$log"' EXIT
trap 'exit 130' INT TERM

ended() {
    echo "llama-server has ended; its last lines:" >&2
    tail -n 5 "$log" >&2
    exit 1
}

waited=0
until curl -sf -o /dev/null "http://127.0.0.1:$port/health"; do
    kill -0 "$pid" 2>/dev/null || ended
    waited=$((waited + 1))
    [ "$waited" -lt 900 ] || { echo "llama-server is not ready after $waited s" >&2; exit 1; }
    sleep 1
done

# Anonymous memory of the process in KiB, swapped out or not.
host() {
    sum=0
    while read -r key value _; do
        case $key in RssAnon: | VmSwap:) sum=$((sum + value)) ;; esac
    done <"/proc/$pid/status"
    echo "$sum"
}

# VRAM of the process in MiB, if nvidia-smi tells it.
vram() {
    command -v nvidia-smi >/dev/null 2>&1 || { echo "?"; return; }
    nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader,nounits 2>/dev/null | {
        found="?"
        while IFS=' ,' read -r one mib; do [ "$one" = "$pid" ] && found=$mib; done
        echo "$found"
    }
}

body() {
    case $(($1 % @BODIES@)) in
@PATHS@    esac
    sed "s/@N@/$1/g" "$here/requests/$(($1 % @BODIES@)).json" |
        curl -sf -o /dev/null -H 'Content-Type: application/json' --data-binary @- "http://127.0.0.1:$port$path"
}

# The start of a process grows: the figure that counts is that of the last two thirds.
third=$((requests / 3))
first_host=0 first_vram="?"
echo "requests  host KiB  VRAM MiB"
n=0
while [ "$n" -lt "$requests" ]; do
    body "$n" || { kill -0 "$pid" 2>/dev/null || ended; echo "request $n failed" >&2; }
    n=$((n + 1))
    if [ "$n" -eq $((third + 1)) ]; then
        first_host=$(host) first_vram=$(vram)
    fi
    if [ $((n % 10)) -eq 0 ] || [ "$n" -eq "$requests" ]; then
        echo "$n  $(host)  $(vram)"
    fi
done
rest=$((requests - third - 1))
[ "$rest" -gt 0 ] || exit 0
last_host=$(host) last_vram=$(vram)
echo "host: $(((last_host - first_host) / rest)) KiB a request over the last $rest"
case $first_vram$last_vram in
*\?*) ;;
*) echo "VRAM: $(((last_vram - first_vram) * 1024 / rest)) KiB a request over the last $rest" ;;
esac
"#;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_text_gets_the_number_of_its_request() {
        let mut chat = serde_json::json!({"messages": [{"role": "user", "content": "hi"}]});
        number(&mut chat);
        assert_eq!(chat["messages"][0]["content"], "@N@ hi");
        let image = serde_json::json!({"type": "image_url", "image_url": {"url": "data:,"}});
        let mut parts =
            serde_json::json!({"messages": [{"content": [image, {"type": "text", "text": "what"}]}]});
        number(&mut parts);
        assert_eq!(parts["messages"][0]["content"][1]["text"], "@N@ what");
        let mut prompt = serde_json::json!({"prompt": "x"});
        number(&mut prompt);
        assert_eq!(prompt["prompt"], "@N@ x");
        let mut input = serde_json::json!({"input": "x"});
        number(&mut input);
        assert_eq!(input, serde_json::json!({"input": "x"}));
    }

    #[test]
    fn secrets_are_left_out_with_their_flags_and_words_are_quoted() {
        let about = About {
            args: ["-m", "/a b/m.gguf", "--api-key", HIDDEN, "-c", "4096"].map(str::to_owned).to_vec(),
            ..About::default()
        };
        assert_eq!(arguments(&about), "-m '/a b/m.gguf' -c 4096");
        assert!(is_name("GGML_X1") && !is_name("1X") && !is_name("A B") && !is_name(""));
    }
}
