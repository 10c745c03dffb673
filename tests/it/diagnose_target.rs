//! The server of `llama-warden diagnose`: the command line takes precedence over the configuration, and
//! missing parts are reported before anything starts.

use std::time::Duration;

use serde_json::{Value, json};
use warden_rig::warden::{SOON, Setup};
use warden_rig::{Context as _, Outcome, Trouble, binaries};

const PATIENCE: Duration = Duration::from_secs(120);

/// One model `m`, also called `other-name`, with a program of its own, and a second program.
fn setup() -> Result<(Setup, String, String), Trouble> {
    let setup = Setup::new()?.fake("m", &json!({}), "aliases = [\"other-name\"]\n")?;
    let config = setup.home.file("w.toml", setup.config())?.display().to_string();
    let fake = binaries::fake_llama()?.display().to_string();
    let second = setup.home.program("second", format!("#!/bin/sh\nexec '{fake}' \"$@\"\n"))?;
    Ok((setup, config, second.display().to_string()))
}

#[tokio::test]
async fn the_program_of_the_command_line_comes_before_that_of_the_only_model() -> Outcome {
    let (setup, config, second) = setup()?;
    for model in [&[][..], &["--model", "m"], &["--model", "other-name"]] {
        let first =
            ["diagnose", "--config", &config, "--json", "--workload", "short-text", "--requests", "4"];
        let program = ["--binary", &second];
        let args = first.iter().chain(model).chain(&program);
        let ran = setup.home.warden(args, PATIENCE).await?;
        let report: Value = serde_json::from_str(&ran.stdout).context(ran.all())?;
        assert_eq!(report["about"]["binary"], json!(second), "{model:?}: {}", ran.all());
        assert_eq!(report["about"]["model"], "m", "{model:?}");
        assert!(ran.stderr.contains(&format!("m: {second}, chosen by --binary")), "{}", ran.all());
    }
    Ok(())
}

#[tokio::test]
async fn a_build_of_the_command_line_is_looked_for_in_place_of_the_configured_program() -> Outcome {
    let (setup, config, _) = setup()?;
    let args = ["diagnose", "--config", &config, "--model", "m", "--build", "abc123"];
    let ran = setup.home.warden(args, SOON).await?;
    assert_eq!(ran.code, 2, "{}", ran.all());
    assert!(ran.stderr.contains("flag --build: there is no build `abc123` in the store"), "{}", ran.all());
    Ok(())
}

#[tokio::test]
async fn a_model_that_does_not_exist_is_told_with_those_that_do_whatever_program_is_named() -> Outcome {
    let (setup, config, second) = setup()?;
    for program in [&[][..], &["--binary", &second], &["--build", "abc123"]] {
        let args = ["diagnose", "--config", &config, "--model", "typo"];
        let ran = setup.home.warden(args.iter().chain(program), SOON).await?;
        assert_eq!(ran.code, 2, "{program:?}: {}", ran.all());
        assert!(ran.stderr.contains("there is no model `typo`"), "{program:?}: {}", ran.all());
        assert!(ran.stderr.contains("the models are: m"), "{program:?}: {}", ran.all());
    }
    Ok(())
}

#[tokio::test]
async fn without_a_configuration_the_cure_is_a_command_line() -> Outcome {
    let script =
        json!({"leak_kib_per_request": 3000, "stopped_by": {"leak_kib_per_request": ["MALLOC_ARENA_MAX"]}});
    let mut setup = Setup::new()?;
    let file = setup.home.file("script.json", script.to_string())?;
    setup.home.env.insert("FAKE_LLAMA_SCRIPT".into(), file.into());
    let fake = binaries::fake_llama()?.display().to_string();
    let args = ["diagnose", "--binary", &fake, "--bisect", "--workload", "short-text", "--requests", "80"];
    let flags = ["--", "-m", "model.gguf", "--cache-ram", "0", "--ctx-checkpoints", "0"];
    let ran = setup.home.warden(args.iter().chain(&flags), PATIENCE).await?;
    let mut lines = ran.stdout.lines().skip_while(|line| *line != "without llama-warden:").skip(1);
    let line = lines.next().context(ran.all())?;
    assert!(line.starts_with("MALLOC_ARENA_MAX=") && line.ends_with(" llama-server …"), "{}", ran.all());
    Ok(())
}

#[tokio::test]
async fn where_nothing_was_run_or_read_nobody_says_that_nothing_leaks() -> Outcome {
    let (setup, config, _) = setup()?;
    for (workload, why) in
        [("same-image", "nothing was run"), ("short-text", "too few readings of short-text")]
    {
        let args = ["diagnose", "--config", &config, "--bisect", "--workload", workload, "--requests", "4"];
        let ran = setup.home.warden(args, PATIENCE).await?;
        assert!(
            ran.stdout.contains(&format!("cure: no cure was looked for: {why}"))
                || ran.stdout.contains(&format!("cure: no cure was looked for: there are {why}")),
            "{}",
            ran.all()
        );
        assert!(!ran.stdout.contains("nothing leaks"), "{}", ran.all());
    }
    Ok(())
}
