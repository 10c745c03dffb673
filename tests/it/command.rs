//! Promise: a model may be served by any program (`command`). llama-warden starts it at an address of its
//! own, sends it requests on any path, watches its memory, and replaces it without a failed request.

use std::time::Duration;

use futures_util::future::join_all;
use hyper::{Method, Request, StatusCode};
use rustix::process::Signal;
use serde_json::{Value, json};
use warden_rig::process::ProcessId;
use warden_rig::warden::{CHAT, SOON, Setup, json_lines};
use warden_rig::{Context as _, Outcome, Trouble, Warden, wait_for, wait_until};

const SERVER: &str = include_str!("command/server.py");

/// Frequent probes and readings.
const OFTEN: &str = "sensors.interval = \"20ms\"\ninternal.sensors.idle_settle = \"1ms\"\n\
                     internal.lifecycle.start_probe_interval = \"20ms\"\n";

/// No delays of a replacement.
const AT_ONCE: &str = "policy.jitter = 0.0\npolicy.quiet_for = \"1ms\"\npolicy.quiet_within = \"100ms\"\n\
                       policy.min_interval = \"1ms\"\npolicy.min_interval_hard = \"1ms\"\n";

/// Configuration with the model `m`, which the stand-in serves.
fn setup(words: &str, toml: &str) -> Result<Setup, Trouble> {
    with_model(Setup::new()?.top(OFTEN), "m", words, toml)
}

fn with_model(setup: Setup, name: &str, words: &str, toml: &str) -> Result<Setup, Trouble> {
    let script = setup.home.file("server.py", SERVER)?;
    let words: Vec<&str> = words.split_whitespace().collect();
    let command =
        format!("command = ['python3', '-u', '{}', '{}']\n{toml}", script.display(), words.join("', '"));
    Ok(setup.model(name, &command))
}

fn echo(model: &str) -> Value {
    json!({"model": model, "input": "words"})
}

async fn pid(warden: &Warden) -> Option<u64> {
    warden.status("m").await.ok()?["backends"][0]["pid"].as_u64()
}

async fn process(warden: &Warden) -> Result<ProcessId, Trouble> {
    let pid = wait_for("the model has a process", SOON, async || pid(warden).await).await?;
    ProcessId::of(i32::try_from(pid)?).context("it runs")
}

async fn until_state(warden: &Warden, model: &str, state: &str) -> Outcome {
    wait_until(&format!("{model} is {state}"), SOON, async || {
        warden.state(model).await.is_ok_and(|now| now == state)
    })
    .await
}

#[tokio::test]
async fn requests_reach_it_on_any_path_by_every_way_to_name_a_model() -> Outcome {
    let setup = setup("${PORT} --threads", "aliases = [\"whisper-1\"]\n")?;
    let warden = with_model(setup, "other", "${SOCKET} --threads", "")?.start().await?;
    let form = "--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\n\r\nRIFF\0\u{1}\r\n--x\r\n\
                Content-Disposition: form-data; name=\"model\"\r\n\r\nwhisper-1\r\n--x--\r\n";
    let request = Request::post("/v1/audio/transcriptions")
        .header("content-type", "multipart/form-data; boundary=x")
        .body(form.as_bytes().to_vec().into())?;
    let told = warden.http.send(request).await?.json()?;
    assert_eq!((&told["path"], &told["bytes"]), (&json!("/v1/audio/transcriptions"), &json!(form.len())));
    for (path, model, wanted) in [
        ("/v1/images/generations", "m", "/v1/images/generations"),
        ("/upstream/m/inference", "-", "/inference"),
        ("/sdapi/v1/txt2img", "other", "/sdapi/v1/txt2img"),
        ("/upstream/other/x?y=1", "-", "/x?y=1"),
    ] {
        let told = warden.http.post(path, &echo(model)).await?;
        assert_eq!(told.json()?["path"], wanted, "{}", told.text());
    }
    let told = warden.http.get("/voices?model=m").await?.json()?;
    assert_eq!(told["voices"], json!(["a"]));
    let put = Request::builder().method(Method::PUT).uri("/upstream/m/thing").body("{}".into())?;
    assert_eq!(warden.http.send(put).await?.json()?["path"], "/thing");
    let sound = warden.http.post("/v1/audio/speech", &echo("m")).await?;
    assert!(sound.header("content-type") == "audio/wav" && sound.body.len() == 4 + 256 * 64);
    let chat = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
    assert_eq!(warden.http.post(CHAT, &chat).await?.answer()?.text, "hi");
    warden
        .until_metrics(&[
            "llama_warden_prompt_tokens_total{model=\"m\"} 5",
            "llama_warden_output_tokens_total{model=\"m\"} 7",
        ])
        .await?;
    let mut events = warden.http.stream("/stream", &echo("m")).await?;
    for number in 0..3 {
        assert_eq!(events.event().await?, Some(number.to_string()));
    }
    // No answer to `/slots` or `/props` was taken for that of a llama-server.
    let status = warden.status("m").await?;
    assert!(status["backends"][0]["slots"].is_null(), "{status}");
    Ok(())
}

#[tokio::test]
async fn a_server_that_knows_nothing_of_models_is_served_all_the_same() -> Outcome {
    let setup = Setup::new()?;
    setup.home.file("files/hello.txt", "hello")?;
    let directory = setup.home.path().join("files");
    let words = "command = [\"python3\", \"-m\", \"http.server\", \"--bind\", \"127.0.0.1\", \"${PORT}\"]";
    let toml = format!("{words}\ndirectory = '{}'\nready = \"/hello.txt\"\n", directory.display());
    let warden = setup.model("files", &toml).start().await?;
    let answer = warden.http.get("/upstream/files/hello.txt").await?;
    assert_eq!((answer.status, answer.text().as_str()), (StatusCode::OK, "hello"));
    Ok(())
}

#[tokio::test]
async fn it_is_ready_when_its_path_says_so_and_until_then_requests_wait() -> Outcome {
    let setup = Setup::new()?.top(OFTEN);
    let file = setup.home.path().join("loaded");
    let words = format!("${{PORT}} --threads --until {}", file.display());
    let warden = with_model(setup, "m", &words, "ready = \"/voices\"\n")?.start().await?;
    let body = echo("m");
    let waits = warden.http.post("/v1/rerank", &body);
    let opens = async {
        // The program has answered a probe with 503.
        wait_until("it was asked", SOON, async || file.with_extension("asked").exists()).await?;
        wait_until("the request waits", SOON, async || warden.waiting("m").await.is_ok_and(|n| n == 1))
            .await?;
        assert_eq!(warden.status("m").await?["backends"][0]["phase"], "starting");
        std::fs::write(&file, "")?;
        Ok::<_, Trouble>(())
    };
    let (answer, opened) = tokio::join!(waits, opens);
    opened?;
    assert_eq!(answer?.json()?["served"], 1);
    Ok(())
}

#[tokio::test]
async fn a_start_that_fails_is_told_with_its_last_lines_and_the_path_that_was_asked() -> Outcome {
    for (words, toml, wanted) in [
        ("${PORT} --exit 3", "", &["exit code 3", "no such voice: bella"][..]),
        (
            "${PORT} --elsewhere",
            "lifecycle.start_timeout = \"1s\"\n",
            &["was not ready within 1 s", "GET /health"],
        ),
        (
            "${PORT} --threads",
            "ready = \"/no\"\nlifecycle.start_timeout = \"1s\"\n",
            &["was not ready within 1 s", "GET /no"],
        ),
    ] {
        let warden = setup(words, toml)?.start().await?;
        let answer = warden.http.post("/v1/audio/speech", &echo("m")).await?;
        assert_eq!(answer.status, StatusCode::SERVICE_UNAVAILABLE, "{}", answer.text());
        for text in wanted {
            assert!(answer.text().contains(text), "{text}: {}", answer.text());
        }
        assert!(!answer.text().contains("llama-server"), "{}", answer.text());
    }
    Ok(())
}

#[tokio::test]
async fn a_program_that_forks_away_is_measured_and_stopped_like_any_other() -> Outcome {
    let mut warden = setup("${PORT} --fork --threads", "")?.start().await?;
    let answer = warden.http.post("/x?model=m", &echo("m")).await?.json()?;
    let pid = i32::try_from(answer["pid"].as_i64().context("its pid")?)?;
    let server = ProcessId::of(pid).context("it runs")?;
    wait_until("its memory is measured", SOON, async || {
        let status = warden.status("m").await.unwrap_or_default();
        status["backends"][0]["host"]["anon"].as_u64().is_some_and(|bytes| bytes > 1 << 20)
    })
    .await?;
    assert_eq!(warden.terminate(SOON).await?, 0);
    Warden::until_gone(&[server], SOON).await
}

#[tokio::test]
async fn under_load_it_is_replaced_and_no_request_fails() -> Outcome {
    for mode in ["sequential", "overlap"] {
        let toml = format!("preload = true\nreplace = \"{mode}\"\nmax_in_flight = 4\n");
        let warden = setup("${PORT} --threads", &toml)?.start().await?;
        until_state(&warden, "m", "loaded").await?;
        let clients = join_all((0..8).map(|_| async {
            let mut sent = 0;
            for _ in 0..60 {
                let answer = warden.http.post("/v1/embeddings", &echo("m")).await?;
                assert!(answer.status.is_success(), "{mode}: {}", answer.text());
                sent += usize::from(answer.json()?["path"] == "/v1/embeddings");
            }
            Ok::<_, Trouble>(sent)
        }));
        let (sent, replaced) = tokio::join!(clients, warden.restart("m", 3));
        replaced?;
        let sent: usize = sent.into_iter().sum::<Result<usize, Trouble>>()?;
        assert_eq!((sent, json_lines(&warden.recycles())?.len()), (480, 3), "{mode}");
    }
    Ok(())
}

#[tokio::test]
async fn growth_by_request_is_found_and_the_process_replaced() -> Outcome {
    let detector = "internal.growth.host_effect = \"4MiB\"\ninternal.growth.allowance_slack = \"4MiB\"\n";
    let toml = format!("{AT_ONCE}policy.host.soft = \"2GiB\"\npolicy.growth = \"recycle\"\n");
    let setup = Setup::new()?.top(OFTEN).top(detector);
    let warden = with_model(setup, "m", "${SOCKET} --leak 512", &toml)?.start().await?;
    assert!(warden.http.post("/v1/audio/speech", &echo("m")).await?.status.is_success());
    let first = pid(&warden).await;
    let mut sent = 0;
    while first == pid(&warden).await {
        for _ in 0..40 {
            let answer = warden.http.post("/v1/audio/speech", &echo("m")).await?;
            assert!(answer.status.is_success(), "{sent}: {}", answer.text());
            sent += 1;
        }
        assert!(sent < 2000, "not within {sent} requests: {}", warden.status("m").await?);
    }
    // The entry is written after the end of the old process.
    let entry =
        wait_for("the ledger has the replacement", SOON, async || json_lines(&warden.recycles()).ok()?.pop())
            .await?;
    assert_eq!(
        (&entry["reason"], &entry["cut"], &entry["helped"]),
        (&json!("growth"), &json!(0), &json!(true))
    );
    Ok(())
}

#[tokio::test]
async fn a_program_with_one_thread_is_alive_while_it_works_and_replaced_when_it_hangs() -> Outcome {
    let toml = "preload = true\nlifecycle.probe_interval = \"20ms\"\nlifecycle.probe_timeout = \"100ms\"\n\
                lifecycle.suspect_timeout = \"300ms\"\nmax_in_flight = 2\n";
    let warden = setup("${PORT}", toml)?.start().await?;
    until_state(&warden, "m", "loaded").await?;
    let first = process(&warden).await?;
    let work = json!({"model": "m", "seconds": 1.5});
    let both = join_all([(); 2].map(|()| warden.http.post("/sleep", &work))).await;
    for answer in both {
        assert_eq!(answer?.json()?["pid"], first.pid, "no other process answers");
    }
    first.signal(Signal::STOP);
    wait_until("another process serves", SOON, async || {
        pid(&warden).await.is_some_and(|pid| pid != u64::from(first.pid.unsigned_abs()))
    })
    .await?;
    let answer = warden.http.post("/x", &echo("m")).await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    Ok(())
}

#[tokio::test]
async fn concurrent_requests_are_limited_on_every_path() -> Outcome {
    let warden = setup("${PORT} --threads", "max_in_flight = 1\npreload = true\n")?.start().await?;
    until_state(&warden, "m", "loaded").await?;
    let work = json!({"model": "m", "seconds": 0.5});
    let send = || warden.http.post("/sleep", &work);
    let waits =
        wait_until("one request waits", SOON, async || warden.waiting("m").await.is_ok_and(|n| n == 1));
    let (one, other, waited) = tokio::join!(send(), send(), waits);
    waited?;
    let mut order = [one?.json()?["served"].as_u64(), other?.json()?["served"].as_u64()];
    order.sort_unstable();
    assert_eq!(order, [Some(1), Some(2)]);
    Ok(())
}

#[tokio::test]
async fn it_is_unloaded_when_idle_and_takes_turns_with_a_llama_server() -> Outcome {
    let setup = setup("${PORT} --threads", "ttl = \"1s\"\ngroups = [\"one\"]\n")?;
    let toml = "preload = false\ngroups = [\"one\"]\n";
    let warden = setup.fake("llama", &json!({}), toml)?.start().await?;
    let chat = json!({"model": "llama", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2});
    assert!(warden.http.post(CHAT, &chat).await?.status.is_success());
    until_state(&warden, "llama", "loaded").await?;
    assert!(warden.http.post("/x", &echo("m")).await?.status.is_success());
    // It has no `ttl`, so it has left for the other model.
    until_state(&warden, "llama", "unloaded").await?;
    until_state(&warden, "m", "unloaded").await?;
    assert_eq!(warden.http.post("/x", &echo("m")).await?.json()?["served"], 1, "a new process");
    assert!(warden.http.post(CHAT, &chat).await?.status.is_success());
    until_state(&warden, "m", "unloaded").await
}

#[tokio::test]
async fn what_belongs_to_llama_server_is_refused_or_told_to_be_off() -> Outcome {
    let setup = setup("${PORT}", "")?;
    let good = setup.config();
    let bad = "\n[models.bad]\ncommand = [\"no-such-program\"]\nmodel = \"m.gguf\"\nwarm = \"disk\"\n\
               mitigations = [\"no-mmap\"]\nready = \"health\"\n[models.llama]\nready = \"/x\"\nmodel = \"model.gguf\"\n";
    setup.home.file("bad.toml", format!("{good}{bad}"))?;
    let ran = setup.home.warden(&["config", "check", "bad.toml"], SOON).await?;
    assert_eq!(ran.code, 2, "{ran:?}");
    for text in [
        "model `bad`: `model` is for llama-server, and `command` starts another program",
        "model `bad`: `warm` is for llama-server",
        "model `bad`: `mitigations` is for llama-server",
        "model `bad`: neither `command` nor `env` says where the program listens",
        "model `bad`: `ready` is no path",
        "model `llama`: `ready` needs `command`",
    ] {
        assert!(ran.stderr.contains(text), "{text}: {}", ran.stderr);
    }
    let gone = "\n[models.gone]\ncommand = [\"no-such-program\", \"${PORT}\"]\n";
    setup.home.file("gone.toml", format!("{good}{gone}"))?;
    let ran = setup.home.warden(&["config", "check", "gone.toml"], SOON).await?;
    assert!(ran.code == 2 && ran.stderr.contains("there is no program `no-such-program` in PATH"), "{ran:?}");

    setup.home.file("good.toml", &good)?;
    let ran = setup.home.warden(&["config", "check", "good.toml"], SOON).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    let ran = setup.home.warden(&["policy", "check", "good.toml"], SOON).await?;
    assert!(ran.stdout.contains("ready when `GET /health` is answered with any status below 500"), "{ran:?}");
    // What `config show` prints is a configuration again.
    let shown = setup.home.warden(&["config", "show", "--config", "good.toml", "--reveal"], SOON).await?;
    setup.home.file("shown.toml", &shown.stdout)?;
    let ran = setup.home.warden(&["config", "check", "shown.toml"], SOON).await?;
    assert_eq!(ran.code, 0, "{ran:?}\n{}", shown.stdout);
    let ran = setup.home.warden(&["diagnose", "--config", "good.toml"], SOON).await?;
    assert!(ran.code == 2 && ran.stderr.contains("served by its own `command`"), "{ran:?}");
    Ok(())
}

/// Time in which a canary would be refused even on a slow machine.
const REFUSED: Duration = Duration::from_secs(10);

#[tokio::test]
async fn it_has_no_canary() -> Outcome {
    let warden = setup("${PORT} --threads", "")?.start().await?;
    let fake = warden_rig::binaries::fake_llama()?;
    let words = ["canary", "start", "m", "--binary", fake.to_str().context("a path")?];
    let ran = tokio::time::timeout(REFUSED, warden.cli(&words)).await.context("no answer")??;
    assert!(ran.code != 0 && ran.stderr.contains("served by its own `command`"), "{ran:?}");
    Ok(())
}
