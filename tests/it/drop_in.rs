//! `llama-warden serve --`, or a link named `llama-server`, replaces `llama-server` without another change.

use std::ffi::OsString;
use std::os::unix::fs::symlink;
use std::time::Duration;

use serde_json::json;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Identity, Outcome, Trouble, binaries, wait_until};

/// A home whose PATH has a fake `llama-server`.
pub(crate) fn setup() -> Result<Setup, Trouble> {
    let mut setup = Setup::new()?;
    let bin = setup.home.path().join("bin");
    std::fs::create_dir(&bin)?;
    symlink(binaries::fake_llama()?, bin.join("llama-server"))?;
    let mut path = bin.into_os_string();
    path.push(":");
    path.push(setup.home.env.get("PATH".as_ref() as &std::ffi::OsStr).context("no PATH")?);
    setup.home.env.insert("PATH".into(), path);
    // The rig expects the admin socket there.
    let admin = setup.home.path().join("admin.sock");
    setup.home.env.insert("LLAMA_WARDEN_ADMIN__SOCKET".into(), admin.into());
    Ok(setup)
}

pub(crate) fn words(text: &[&str]) -> Vec<OsString> {
    text.iter().map(OsString::from).collect()
}

#[tokio::test]
async fn llama_servers_flags_after_the_dashes_serve_one_model() -> Outcome {
    let args =
        words(&["serve", "--", "-m", "model.gguf", "-c", "2048", "-np", "2", "--port", "0", "-a", "nick"]);
    let warden = setup()?.start_with(&args).await?;
    let backend = warden.until_ready(1).await?[0];
    let line = backend.command_line();
    for passed in ["-c", "2048", "-np", "2"] {
        assert!(line.contains(&passed.to_owned()), "{passed} is not in {line:?}");
    }
    assert!(!line.contains(&"--port".to_owned()), "listening is ours: {line:?}");
    // As with llama-server, any model name reaches the model, as does none.
    for model in ["nick", "gpt-4o"] {
        let answer = warden.http.post(CHAT, &chat("x", model, "hi", 3, true)).await?;
        assert!(answer.answer()?.is_whole(), "{model}: {}", answer.text());
    }
    let nameless = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3});
    assert!(warden.http.post(CHAT, &nameless).await?.answer()?.is_whole());
    assert!(warden.http.get("/props").await?.status.is_success());
    assert_eq!(warden.http.get("/v1/models").await?.json()?["data"][0]["id"], "nick");
    Ok(())
}

#[tokio::test]
async fn under_llama_servers_name_it_takes_its_flags_directly() -> Outcome {
    let setup = setup()?;
    let link = setup.home.path().join("llama-server");
    symlink(binaries::llama_warden()?, &link)?;
    let args = words(&["-m", "model.gguf", "--port", "0", "--host", "127.0.0.1", "-np", "3"]);
    let warden = setup.start_program(&link, &args).await?;
    warden.until_ready(1).await?;
    let answer = warden.http.post("/completion", &json!({"prompt": "hi", "n_predict": 3})).await?;
    assert!(answer.answer()?.is_whole(), "{}", answer.text());
    Ok(())
}

#[tokio::test]
async fn a_first_start_that_fails_ends_it_with_what_llama_server_said() -> Outcome {
    for (fail, said) in [("corrupt_model", "model"), ("abort", "signal")] {
        let mut setup = setup()?;
        let script = setup.home.file("script.json", json!({"fail": fail}).to_string())?;
        setup.home.env.insert("FAKE_LLAMA_SCRIPT".into(), script.into());
        let link = setup.home.path().join("llama-server");
        symlink(binaries::llama_warden()?, &link)?;
        let ran = setup.home.run(&link, ["-m", "model.gguf", "--port", "0"], SOON).await?;
        assert_eq!(ran.code, 1, "{fail}: {ran:?}");
        assert!(ran.stderr.contains("error: llama-server did not start: "), "{fail}: {ran:?}");
        assert!(ran.stderr.contains(said) && ran.stderr.contains("hint: "), "{fail}: {ran:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_process_that_was_up_is_started_again_when_it_dies() -> Outcome {
    let mut warden = setup()?.start_with(&words(&["serve", "--", "-m", "model.gguf", "--port", "0"])).await?;
    let first = warden.until_ready(1).await?[0];
    first.signal(rustix::process::Signal::KILL);
    wait_until("there is another", SOON, async || {
        warden.until_ready(1).await.is_ok_and(|backends| backends[0] != first)
    })
    .await?;
    assert!(warden.kid.ended().is_none());
    Ok(())
}

#[tokio::test]
async fn certificate_and_prefix_are_taken_from_llama_servers_flags_and_variables() -> Outcome {
    for with_flags in [true, false] {
        let mut setup = setup()?;
        let identity = Identity::new()?;
        let (cert, key) = identity.put(setup.home.path())?;
        let mut args = words(&["serve", "--", "-m", "model.gguf", "--port", "0"]);
        for (flag, variable, value) in [
            ("--ssl-cert-file", "LLAMA_ARG_SSL_CERT_FILE", cert.as_os_str()),
            ("--ssl-key-file", "LLAMA_ARG_SSL_KEY_FILE", key.as_os_str()),
            ("--api-prefix", "LLAMA_ARG_API_PREFIX", "/llm".as_ref()),
        ] {
            if with_flags {
                args.extend([flag.into(), value.to_owned()]);
            } else {
                setup.home.env.insert(variable.into(), value.to_owned());
            }
        }
        let warden = setup.start_with(&args).await?;
        let backend = warden.until_ready(1).await?[0];
        assert_eq!(backend.variable("LLAMA_ARG_API_PREFIX"), None, "we speak to it without");
        let https = warden.https(&identity);
        let answer = https.post(&format!("/llm{CHAT}"), &chat("x", "any", "hi", 3, true)).await?;
        assert!(answer.answer()?.is_whole(), "{}", answer.text());
        assert!(https.get("/llm/health").await?.status.is_success());
        assert!(https.get("/llm/v1/models").await?.json()?["data"].is_array());
        for outside in ["/health", "/v1/models", "/llmx/health", "/"] {
            let answer = https.get(outside).await?;
            assert_eq!(answer.status.as_u16(), 404, "{outside}: {}", answer.text());
            assert_eq!(answer.json()?["error"]["type"], "not_found_error");
        }
    }
    Ok(())
}

#[tokio::test]
async fn questions_that_llama_server_answers_itself_are_passed_on() -> Outcome {
    let setup = setup()?;
    let link = setup.home.path().join("llama-server");
    symlink(binaries::llama_warden()?, &link)?;
    let ran = setup.home.run(&link, ["--version"], SOON).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    assert!(ran.all().contains("0.0.0-fake"), "{ran:?}");
    Ok(())
}

#[tokio::test]
async fn a_variable_of_the_environment_comes_over_the_file_and_a_flag_over_both() -> Outcome {
    let mut setup = Setup::new()?.fake("m", &json!({}), "preload = false\nqueue.depth = 11\n")?;
    setup.home.env.insert("LLAMA_WARDEN_MODELS__M__QUEUE__DEPTH".into(), "12".into());
    let config = setup.home.file("warden.toml", setup.config())?;
    let ran = setup
        .home
        .warden([OsString::from("config"), "show".into(), "--config".into(), config.into()], SOON)
        .await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    let line = ran.stdout.lines().find(|line| line.contains("depth = 12"));
    let line = line.context(format!("the variable's value is not shown: {}", ran.stdout))?;
    assert!(line.contains("LLAMA_WARDEN_MODELS__M__QUEUE__DEPTH"), "where it comes from: {line}");
    let warden = setup.start().await?;
    assert_eq!(warden.status("m").await?["queue_depth"], 12);
    Ok(())
}

#[tokio::test]
async fn children_get_a_private_socket_a_group_of_their_own_and_an_oom_score() -> Outcome {
    use std::os::unix::fs::PermissionsExt as _;
    let warden = Setup::new()?.fake("m", &json!({}), "")?.start().await?;
    let backend = warden.until_ready(1).await?[0];
    let socket = backend.socket().context("no socket")?;
    let folder = socket.parent().context("no folder")?;
    assert_eq!(std::fs::metadata(folder)?.permissions().mode() & 0o777, 0o700);
    let stat = procfs::process::Process::new(backend.pid)?.stat()?;
    assert_eq!(stat.pgrp, backend.pid, "it leads a process group of its own");
    let score = std::fs::read_to_string(format!("/proc/{}/oom_score_adj", backend.pid))?;
    assert_eq!(score.trim(), "500");
    wait_until("its output is in `logs`", Duration::from_secs(10), async || {
        warden
            .cli(&["logs", "m"])
            .await
            .is_ok_and(|ran| ran.stdout.contains("model loaded") && ran.stdout.contains("[m "))
    })
    .await
}
