//! Sources of settings, and messages about them: variables, secrets, contradictions, unknown flags.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Home, Outcome, Trouble, Warden, wait_until};

const LONG: Duration = Duration::from_secs(300);

const TOKEN: &str = "hf_abcdefghijklmnopqrstuvwxyzABCD1234";

#[tokio::test]
async fn a_variable_reaches_the_process_under_the_name_that_somebody_wrote_and_a_model_whatever_its_capitals()
-> Outcome {
    let mut setup = Setup::new()?.fake("Qwen3", &json!({}), "preload = true\n")?;
    for (name, value) in
        [("DEFAULTS__ENV__GGML_CUDA_DISABLE_GRAPHS", "1"), ("MODELS__QWEN3__QUEUE__DEPTH", "12")]
    {
        setup.home.env.insert(format!("LLAMA_WARDEN_{name}").into(), value.into());
    }
    let warden = setup.start().await?;
    let process = warden.until_ready(1).await?[0];
    let environment = std::fs::read(format!("/proc/{}/environ", process.pid))?;
    let environment = String::from_utf8_lossy(&environment);
    assert!(environment.split('\0').any(|one| one == "GGML_CUDA_DISABLE_GRAPHS=1"), "{environment}");
    assert_eq!(warden.status("Qwen3").await?["queue_depth"], 12);
    assert!(warden.status("qwen3").await.is_err(), "no model is made up");
    Ok(())
}

#[tokio::test]
async fn a_variable_of_a_model_that_does_not_exist_is_an_error_with_the_nearest_one() -> Outcome {
    let mut setup = Setup::new()?.fake("Qwen3", &json!({}), "")?;
    setup.home.env.insert("LLAMA_WARDEN_MODELS__QWEN__REPLICAS".into(), "2".into());
    setup.home.file("warden.toml", setup.config())?;
    let ran = setup.home.warden(["config", "check", "warden.toml"], SOON).await?;
    assert_eq!(ran.code, 2, "{ran:?}");
    for part in ["LLAMA_WARDEN_MODELS__QWEN__REPLICAS", "no model `QWEN`", "`Qwen3`"] {
        assert!(ran.stderr.contains(part), "{part}: {ran:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_good_configuration_is_told_in_a_line_with_what_is_probably_not_meant() -> Outcome {
    let setup = Setup::new()?.fake("one", &json!({}), "")?.fake(
        "two",
        &json!({}),
        "lifecycle.start_timeout = \"1s\"\n",
    )?;
    setup.home.file("warden.toml", setup.config())?;
    let ran = setup.home.warden(["config", "check", "warden.toml"], SOON).await?;
    insta::assert_snapshot!(crate::pages::page(setup.home.path(), &ran));
    Ok(())
}

#[tokio::test]
async fn secrets_of_a_configuration_are_shown_to_whoever_asks_for_them_only() -> Outcome {
    let env = format!("defaults.env = {{ HF_TOKEN = \"hush\", HARMLESS = \"{TOKEN}\" }}");
    let setup = Setup::new()?.top(&env).fake("m", &json!({}), "args = [\"--api-key\", \"shh\"]\n")?;
    setup.home.file("warden.toml", setup.config())?;
    let shown = setup.home.warden(["config", "show", "warden.toml"], SOON).await?;
    assert!(shown.code == 0 && shown.stdout.contains("--reveal"), "{shown:?}");
    assert!(!["hush", TOKEN, "shh"].iter().any(|secret| shown.all().contains(secret)), "{shown:?}");
    let shown = setup.home.warden(["config", "show", "warden.toml", "--reveal"], SOON).await?;
    assert!(["hush", TOKEN, "shh"].iter().all(|secret| shown.stdout.contains(secret)), "{shown:?}");
    for directory in ["state_dir", "data_dir", "cache_dir"] {
        assert!(shown.stdout.contains(&format!("\n{directory} = \"/")), "{directory}: {shown:?}");
    }
    Ok(())
}

/// Inputs and outputs of a process, each with a secret part.
const PLANTED: [(&str, &str); 6] = [
    ("token hf_abcdefghijklmnopqrstuvwxyzABCD1234", "hf_abcdefghijklmnopqrstuvwxyzABCD1234"),
    ("Authorization: Bearer sk-proj-abcdefgh1234ijkl5678mnop", "sk-proj-abcdefgh1234ijkl5678mnop"),
    ("cloning with ghp_abcdefghijklmnopqrstuvwxyz0123456789", "ghp_abcdefghijklmnopqrstuvwxyz0123456789"),
    ("started with MY_OWN_TOKEN=open-sesame", "open-sesame"),
    ("the flag was correct-horse-battery-staple", "correct-horse-battery-staple"),
    ("the variable was tr0ub4dor-and-3", "tr0ub4dor-and-3"),
];

fn says_secrets() -> Vec<&'static str> {
    PLANTED.iter().map(|(line, _)| *line).collect()
}

fn secret_in(text: &str) -> Option<&'static str> {
    PLANTED.iter().map(|(_, secret)| *secret).find(|secret| text.contains(secret))
}

/// All files below a directory, except those of the test itself.
fn files_below(directory: &Path, but: &[&str]) -> Result<Vec<PathBuf>, Trouble> {
    let (mut files, mut left) = (Vec::new(), vec![directory.to_owned()]);
    while let Some(directory) = left.pop() {
        for entry in std::fs::read_dir(&directory)? {
            let path = entry?.path();
            if but.iter().any(|name| path.ends_with(name)) {
                continue;
            }
            if path.is_dir() {
                left.push(path);
            } else if path.is_file() {
                files.push(path);
            }
        }
    }
    Ok(files)
}

#[tokio::test]
async fn no_secret_that_a_process_has_or_says_comes_out_anywhere() -> Outcome {
    let keys = "lifecycle.backoff_first = \"50ms\"\nlifecycle.crash_cap = \"50ms\"\nqueue.wait = \"2s\"\n";
    let script = json!({ "stderr": says_secrets() });
    let setup = Setup::new()?.top("log.access = 'access.log'\nadmin.address = '127.0.0.1:0'");
    let setup = setup.fake("m", &script, keys)?;
    let config = setup.config().replace("env = {", "env = { A_TOKEN = \"tr0ub4dor-and-3\",");
    let config = config.replace("args = [", "args = [\"--hf-token\", \"correct-horse-battery-staple\", ");
    let file = setup.home.file("warden.toml", config)?;
    let mut warden = setup.start_with(&["serve".into(), "--config".into(), file.into()]).await?;
    let child = warden.until_ready(1).await?[0];
    let ask = async |warden: &Warden| warden.http.post(CHAT, &chat("a", "m", "go", 2, false)).await;
    assert!(ask(&warden).await?.status.is_success());
    let seen = RefCell::new(String::new());
    let see = |text: &str| {
        seen.borrow_mut().push_str(text);
        match secret_in(text) {
            Some(secret) => Err(Trouble::new(format!("{secret} is in\n{text}"))),
            None => Ok(()),
        }
    };
    // A process that dies, and then cannot start: its last lines appear in many places.
    warden.script("m", &json!({ "fail": "abort" })).await?;
    child.signal(Signal::KILL);
    wait_until("a failed start is told", SOON, async || {
        warden.cli(&["events"]).await.is_ok_and(|ran| ran.stdout.contains("GGML_ASSERT"))
    })
    .await?;
    see(&warden.cli(&["restart", "m"]).await?.all())?;
    see(&ask(&warden).await?.text())?;
    for words in [
        &["status"][..],
        &["status", "--json"],
        &["events"],
        &["events", "--json"],
        &["logs", "m"],
        &["history"],
        &["history", "--json"],
        &["config", "show", "warden.toml"],
        &["config", "check", "warden.toml"],
        &["quarantine", "list"],
    ] {
        see(&warden.cli(words).await?.all())?;
    }
    for target in ["/status", "/events", "/metrics", "/models/m/logs"] {
        see(&warden.admin().get(target).await?.text())?;
    }
    let revealed = warden.cli(&["logs", "m", "--reveal"]).await?;
    assert!(revealed.stdout.contains(PLANTED[0].1), "{revealed:?}");
    warden.terminate(SOON).await?;
    see(&warden.kid.output())?;
    let all = seen.borrow().clone();
    assert!(all.contains("***") && all.contains("GGML_ASSERT"), "{all}");
    // Files on disk: history, ledger, access log and own log.
    let written =
        files_below(warden.home().path(), &["warden.toml", "scripts", "ledger.jsonl", "model.gguf"])?;
    assert!(written.iter().any(|path| path.ends_with("events.jsonl")), "{written:?}");
    for path in written {
        see(&String::from_utf8_lossy(&std::fs::read(&path)?))?;
    }
    see(&std::fs::read_to_string(warden.recycles()).unwrap_or_default())?;
    Ok(())
}

#[tokio::test]
async fn no_secret_that_a_process_has_or_says_comes_into_a_report_about_it() -> Outcome {
    let faults = json!([{ "from": 5, "do": "crash" }]);
    let mut home = Home::with_fake(&json!({ "stderr": says_secrets(), "faults": faults }))?;
    home.env.insert("A_TOKEN".into(), "tr0ub4dor-and-3".into());
    let fake = warden_rig::binaries::fake_llama()?.to_string_lossy().into_owned();
    for more in [&["--report", "report"][..], &["--json"]] {
        let first = ["diagnose", "--binary", &fake, "--workload", "short-text", "--requests", "8"];
        let flags = ["--", "-m", "model.gguf", "--hf-token", "correct-horse-battery-staple"];
        let ran = home.warden(first.iter().chain(more).chain(&flags), LONG).await?;
        assert!(ran.all().contains("crashed") && ran.code == 4, "{ran:?}");
        assert_eq!(secret_in(&ran.all()), None, "{ran:?}");
    }
    let written = files_below(home.path(), &["script.json", "model.gguf"])?;
    assert!(written.iter().any(|path| path.ends_with("report/findings.json")), "{written:?}");
    for path in written {
        let text = String::from_utf8_lossy(&std::fs::read(&path)?).into_owned();
        assert_eq!(secret_in(&text), None, "{}: {text}", path.display());
    }
    Ok(())
}

#[tokio::test]
async fn settings_that_contradict_each_other_are_named_with_the_numbers() -> Outcome {
    let keys = "args = [\"--cache-ram\", \"4096\", \"-np\", \"8\"]\nmax_in_flight = 10\npolicy.host.soft = \"2GiB\"\n\
                policy.vram.hard = 12\npolicy.max_age = \"1m\"\n";
    let setup = Setup::new()?.top("server.body_bytes = \"1GiB\"").fake("m", &json!({}), keys)?;
    setup.home.file("warden.toml", setup.config())?;
    let ran = setup.home.warden(["config", "check", "warden.toml"], SOON).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    for part in [
        "2.0 GiB is below the prompt cache, which may grow to 4.0 GiB",
        "`max_in_flight` is 10, and a process has 8 slots",
        "a budget of 12 B",
        "`max_age` is 1 min, and replacements are at least 10 min apart",
        "allows bodies of 1.0 GiB, and of `server.buffered_bytes`, which is 256.0 MiB, one client holds 170.7 MiB at most",
    ] {
        assert!(ran.stderr.contains(part), "{part}: {ran:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_flag_or_variable_that_the_llama_server_does_not_have_is_named_with_the_nearest_one() -> Outcome {
    let home = Home::new()?;
    home.file("m.gguf", "")?;
    let flags: String = (0..30)
        .flat_map(|number| [format!("-x{number}, --flag-{number} N    something"), "\n".to_owned()])
        .collect();
    let script = format!(
        "#!/bin/sh\ncase $1 in\n--version) echo 'version: 1 (abc)';;\n--help) cat <<'EOF'\n-m, --model FNAME  a file\n-c, \
         --ctx-size N  tokens (env: LLAMA_ARG_CTX_SIZE)\n{flags}EOF\n;;\nesac\n"
    );
    let server = home.program("llama-server", script)?;
    for (args, variable, code) in [
        ("\"-c\", \"1\", \"--ctx_size\", \"2\"", "LLAMA_ARG_CTX_SIZE", 0),
        ("\"-c\", \"1\",\n  \"--ctx-sice\", \"2\"", "LLAMA_ARG_CTX_SICE", 2),
    ] {
        let text = format!(
            "[models.a]\nmodel = \"m.gguf\"\nbinary = \"{}\"\nargs = [{args}]\n[models.a.env]\n{variable} = \"1\"\n",
            server.display()
        );
        home.file("warden.toml", text)?;
        let ran = home.warden(["config", "check", "warden.toml"], SOON).await?;
        assert_eq!(ran.code, code, "{args}: {ran:?}");
        if code != 0 {
            for part in [
                "warden.toml:5",
                "has no flag `--ctx-sice`",
                "the nearest is `--ctx-size`",
                "warden.toml:7",
                "ignores the variable `LLAMA_ARG_CTX_SICE`",
                "the nearest is `LLAMA_ARG_CTX_SIZE`",
            ] {
                assert!(ran.stderr.contains(part), "{part}: {ran:?}");
            }
        }
    }
    Ok(())
}
