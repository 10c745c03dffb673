//! `import` converts another program's configuration, and lists the parts without an equivalent.

use std::path::Path;

use serde_json::json;
use warden_rig::real::llama_server;
use warden_rig::real_weights::{self, is_sentence};
use warden_rig::warden::{CHAT, SOON, Setup};
use warden_rig::{Context as _, Home, Outcome, Trouble};

const SWAP: &str = "apiKeys: [sk-0123456789abcdef]
models:
  small:
    cmd: /bin/true --port ${PORT} -m MODEL -c 2048
    cmdStop: kill ${PID}
";

#[tokio::test]
async fn a_configuration_of_llama_swap_becomes_one_that_is_checked_and_never_over_another_file() -> Outcome {
    let home = Home::new()?;
    home.sample_model("small.gguf").await?;
    let model = home.path().join("small.gguf");
    home.file("swap.yaml", SWAP.replace("MODEL", &model.display().to_string()))?;
    let import = ["import", "swap.yaml", "-o", "warden.toml"];
    let ran = home.warden(&import, SOON).await?;
    assert!(ran.code == 0 && ran.stdout.is_empty(), "{ran:?}");
    assert!(ran.stderr.contains("1 model imported, 2 left without an equal"), "{ran:?}");
    assert!(ran.stderr.contains("`cmdStop`") && !ran.stderr.contains("sk-0123"), "{ran:?}");
    let written = std::fs::read_to_string(home.path().join("warden.toml"))?;
    assert!(written.contains("# - model `small`: `cmdStop`: ") && !written.contains("sk-0123"), "{written}");
    let ran = home.warden(&["plan", "--config", "warden.toml", "--gpus", "none"], SOON).await?;
    assert!(ran.code == 0 && ran.stdout.contains("it fits: small on the host"), "{ran:?}");

    let ran = home.warden(&import, SOON).await?;
    assert!(ran.code == 2 && ran.stderr.contains("nothing is overwritten"), "{ran:?}");
    assert_eq!(std::fs::read_to_string(home.path().join("warden.toml"))?, written);
    Ok(())
}

#[tokio::test]
async fn a_command_line_becomes_one_model_and_what_is_no_command_is_told() -> Outcome {
    let home = Home::new()?;
    let ran = home.warden(&["import", "--", "llama-server", "-hf", "org/a", "--port", "9000"], SOON).await?;
    assert!(ran.code == 0 && ran.stdout.contains("port = 9000\n"), "{ran:?}");
    assert!(ran.stdout.contains("[models.\"org/a\"]\nargs = [\"-hf\", \"org/a\"]\n"), "{ran:?}");
    home.file("run.sh", "llama-server -m 'a.gguf\n")?;
    for (words, told) in [
        (&["import"][..], "there is nothing to import"),
        (&["import", "gone.yaml"], "cannot read gone.yaml"),
        (&["import", "run.sh"], "line 1 of the command opens a quote"),
        (&["import", "run.sh", "--", "llama-server"], "both a file and a command"),
        (&["import", "--from", "ollama", "none"], "there are no models of Ollama"),
    ] {
        let ran = home.warden(words, SOON).await?;
        assert!(
            ran.code == 2 && ran.stderr.contains(told) && ran.stderr.contains("hint: "),
            "{told}: {ran:?}"
        );
    }
    Ok(())
}

/// llama-swap: an alias, named parameters, and a folded command with a comment at its end.
const VARIANTS: &str = r#"
healthCheckTimeout: 60
models:
  talk:
    cmd: llama-server --port ${PORT} -m WEIGHTS -c 2048 -np 1 -t 1
    aliases: [gpt-4o-mini]
    filters:
      setParamsByID:
        "${MODEL_ID}:sure": { temperature: 0 }
  folded:
    cmd: >
      llama-server --port ${PORT} -m WEIGHTS
      -np 1 -t 1 -c 1024 # and no more
"#;

/// llama-swap: macros, and models that take turns next to one that stays.
const TURNS: &str = r#"
macros:
  server: llama-server --host 127.0.0.1 --port ${PORT} -np 1 -t 1
models:
  stays: { cmd: "${server} -m WEIGHTS -c 1024", env: ["LLAMA_ARG_CACHE_RAM=0"] }
  day: { cmd: "${server} -m WEIGHTS -c 1024", ttl: 300 }
  night: { cmd: "${server} -m WEIGHTS -c 2048" }
groups:
  always: { swap: false, exclusive: false, persistent: true, members: [stays] }
  in-turn: { swap: true, exclusive: false, members: [day, night] }
"#;

/// Presets of llama-server's router: flags and variables, for all models and for one.
const PRESETS: &str = "version = 1
[*]
parallel = 1
t = 1
LLAMA_ARG_CTX_SIZE = 2048
[small]
model = WEIGHTS
alias = near
[other]
m = WEIGHTS
c = 1024
LLAMA_ARG_ALIAS = fast,quality
";

#[tokio::test]
async fn what_was_imported_serves_sentences_by_each_of_its_names() -> Outcome {
    let Some(model) = real_weights::smollm2().await? else { return Ok(()) };
    let server = llama_server().await?;
    let folder = server.parent().context("a program lies in a folder")?;
    for (file, text, names) in [
        ("variants.yaml", VARIANTS, &["talk", "gpt-4o-mini", "talk:sure", "folded"][..]),
        ("turns.yaml", TURNS, &["stays", "day", "night", "stays"]),
        ("presets.ini", PRESETS, &["small", "near", "other", "fast", "quality"]),
    ] {
        serves(file, &text.replace("WEIGHTS", &model.display().to_string()), names, folder)
            .await
            .context(file)?;
    }
    Ok(())
}

/// Imports the file, starts the result with the llama-server of this folder, and sends a request to each
/// name.
async fn serves(file: &str, text: &str, names: &[&str], folder: &Path) -> Outcome {
    let mut setup = Setup::new()?;
    let path = std::env::join_paths([folder, Path::new("/usr/bin"), Path::new("/bin")])?;
    setup.home.env.insert("PATH".into(), path);
    setup.home.file(file, text)?;
    let ran = setup.home.warden(["import", file], SOON).await?;
    assert!(ran.code == 0 && ran.stderr.contains("imported"), "{ran:?}");
    // The test only adds the listeners.
    let config = setup.home.file("warden.toml", setup.config() + &ran.stdout)?;
    let warden = setup.start_with(&["serve".into(), "--config".into(), config.into()]).await?;
    let mut answers = Vec::new();
    for name in names {
        let messages = json!([{ "role": "user", "content": "How many days are in a week?" }]);
        let body = json!({ "model": name, "messages": messages, "max_tokens": 48, "temperature": 0 });
        let answer = warden.http.post(CHAT, &body).await?.answer()?;
        assert!(answer.is_whole() && is_sentence(&answer.text), "{file}, {name}: {answer:?}");
        answers.push(answer.text);
    }
    assert!(answers.iter().all(|answer| answer.contains('7')), "{file}: {answers:?}");
    Ok(())
}

/// llama-swap: a server behind two wrappers, with fields for model lists, and named parameters.
const WRAPPED: &str = r#"
models:
  niced:
    cmd: >
      sh -c 'FROM_PREAMBLE=$((40 + 2)) && export FROM_PREAMBLE && exec nice -n 7 FAKE --port ${PORT} -m MODEL -np 2'
    env: ["FAKE_LLAMA_SCRIPT=SCRIPT", "FAKE_LLAMA_LEDGER=LEDGER"]
    aliases: [other]
    name: A niced model
    metadata: { size: 7 }
    capabilities: { in: [text, image], out: [text], tools: true }
    filters:
      setParamsByID:
        niced: { max_tokens: 3 }
  unseen:
    cmd: FAKE --port ${PORT} -m MODEL
    unlisted: true
"#;

#[tokio::test]
async fn what_was_imported_runs_behind_its_wrapper_and_is_listed_as_it_was() -> Outcome {
    // The rig's model provides the setup that fake-llama needs.
    let mut setup = Setup::new()?.fake("own", &json!({}), "")?;
    let place = |name: &str| setup.home.path().join(name).display().to_string();
    let fake = place("llama-server");
    std::os::unix::fs::symlink(warden_rig::binaries::fake_llama()?, &fake)?;
    let text = WRAPPED
        .replace("FAKE ", &format!("{fake} "))
        .replace("MODEL", &place("model.gguf"))
        .replace("SCRIPT", &place("own.json"))
        .replace("LEDGER", &place("ledger.jsonl"));
    setup.home.file("own.json", "{}")?;
    setup.home.file("swap.yaml", text)?;
    let ran = setup.home.warden(["import", "swap.yaml"], SOON).await?;
    assert!(ran.code == 0 && ran.stderr.contains("2 models imported, 0 left"), "{ran:?}");
    let named = "\n[names.\"claude-*\"]\nmodels = [\"niced\"]\n";
    let config = setup.home.file("warden.toml", setup.config() + &ran.stdout + named)?;
    let checked = setup.home.warden(["config", "check", "warden.toml"], SOON).await?;
    assert!(checked.code == 0, "{checked:?}");
    setup.home.env.insert("FROM_PREAMBLE".into(), "0".into());
    let warden = setup.start_with(&["serve".into(), "--config".into(), config.into()]).await?;
    for (name, tokens) in [("niced", 3), ("other", 9), ("claude-opus", 9)] {
        let body = warden_rig::warden::chat(name, name, "hi", 9, false);
        let answer = warden.http.post(CHAT, &body).await?.answer()?;
        let counted = answer.usage.as_ref().map(|usage| &usage["completion_tokens"]);
        assert_eq!(counted, Some(&json!(tokens)), "{name}: {answer:?}");
    }
    let status = warden.status("niced").await?;
    let pid = status["backends"][0]["pid"].as_u64().context("a process")?;
    let nice = |process: &str| -> Result<i64, Trouble> {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
        let field = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(16));
        Ok(field.context(&stat)?.parse()?)
    };
    // The tests themselves may run with a lower priority.
    assert_eq!(nice(&pid.to_string())?, (nice("self")? + 7).min(19));
    let environ = std::fs::read(format!("/proc/{pid}/environ"))?;
    assert!(
        environ.split(|byte| *byte == 0).any(|line| line == b"FROM_PREAMBLE=42"),
        "the shell's lines ran"
    );
    let list = warden.http.get("/v1/models").await?.json()?;
    let entries = list["data"].as_array().context("a list")?;
    let ids: Vec<&str> = entries.iter().filter_map(|entry| entry["id"].as_str()).collect();
    assert_eq!(ids, ["own", "niced"], "{list}");
    let niced = &entries[1];
    assert_eq!((&niced["name"], &niced["meta"]["llamaswap"]["size"]), (&json!("A niced model"), &json!(7)));
    assert!(niced["capabilities"]["function_calling"] == true && niced["supported_parameters"][0] == "tools");
    Ok(())
}
