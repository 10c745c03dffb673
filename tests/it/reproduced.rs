//! The folder of `diagnose --report` shows what was found and what was not, and its script shows the same
//! growth without llama-warden.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use warden_experiment::Workload;
use warden_rig::home::Ran;
use warden_rig::{Context as _, Home, Outcome, Trouble, binaries};

/// Limit for a leg and a script on a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);

const PLAIN: [&str; 4] = ["-np", "2", "--mmproj", "model.gguf"];

async fn reported(home: &Home, args: &[&str], flags: &[&str]) -> Result<Ran, Trouble> {
    let fake = binaries::fake_llama()?.to_string_lossy().into_owned();
    let first = ["diagnose", "--binary", &fake, "--report", "out"];
    let all = first.iter().chain(args).chain(&["--", "-m", "model.gguf"]).chain(&PLAIN).chain(flags);
    home.warden(all, PATIENCE).await
}

fn file(home: &Home, name: &str) -> Result<String, Trouble> {
    std::fs::read_to_string(home.path().join("out").join(name)).context(name)
}

/// Runs the script from another folder; returns its growth of host memory in KiB per request.
async fn reproduced(home: &mut Home, requests: u32) -> Result<(i64, Ran), Trouble> {
    let port = warden_rig::ports::free()?;
    home.env.insert("PORT".into(), port.to_string().into());
    let script = home.path().join("out/reproduce.sh").to_string_lossy().into_owned();
    let line = format!("cd / && sh '{script}' {requests}");
    let ran = home.run(Path::new("sh"), ["-c", line.as_str()], PATIENCE).await?;
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{}", ran.all());
    let rate = ran.stdout.lines().find_map(|line| line.strip_prefix("host: ")?.split_once(" KiB a request"));
    Ok((rate.context(ran.all())?.0.parse()?, ran))
}

#[tokio::test]
async fn the_script_shows_the_growth_of_each_workload_without_us() -> Outcome {
    for workload in Workload::ALL {
        let mut home = Home::with_fake(&json!({ "leak_kib_per_request": 2048 }))?;
        let args = ["--workload", workload.as_str(), "--requests", "12"];
        let ran = reported(&home, &args, &["--cache-ram", "0"]).await?;
        assert!(home.path().join("out/reproduce.sh").is_file(), "{workload}: {}", ran.all());
        let (rate, ran) = reproduced(&mut home, 18).await?;
        assert!((1700..2700).contains(&rate), "{workload}: {}", ran.all());
    }
    Ok(())
}

#[tokio::test]
async fn a_leak_beside_the_prompt_cache_is_shown_without_the_cache_and_with_what_was_inherited() -> Outcome {
    let mut home = Home::with_fake(&json!({ "leak_kib_per_request": 4000 }))?;
    for (name, value) in [("GGML_TEST_VALUE", "a b"), ("LLAMA_ARG_TEST_TOKEN", "hush"), ("UNRELATED", "hush")]
    {
        home.env.insert(name.into(), value.into());
    }
    let ran = reported(&home, &["--workload", "short-text"], &[]).await?;
    assert_eq!(ran.code, 3, "{}", ran.all());
    let text = file(&home, "report.md")?;
    assert!(
        text.contains("host under short-text (no cache): +3.9") && text.contains("GGML_TEST_VALUE='a b' "),
        "{text}"
    );
    assert!(text.contains("| llama-server says | version: "), "{text}");
    let script = file(&home, "reproduce.sh")?;
    assert!(
        script.contains(" --cache-ram 0 --host") && script.contains("export GGML_TEST_VALUE='a b'\n"),
        "{script}"
    );
    for name in ["report.md", "findings.json", "reproduce.sh"] {
        assert!(!file(&home, name)?.contains("hush"), "{name}");
    }
    // Another user has the model at another path.
    let elsewhere = home.file("elsewhere.gguf", "GGUF")?;
    home.env.insert("MODEL".into(), elsewhere.into());
    std::fs::remove_file(home.path().join("model.gguf"))?;
    let (rate, ran) = reproduced(&mut home, 18).await?;
    assert!((3500..4700).contains(&rate), "{}", ran.all());
    Ok(())
}

#[tokio::test]
async fn call_sites_are_in_the_report_and_in_the_findings() -> Outcome {
    let home = Home::with_fake(&json!({ "leak_kib_per_request": 3000 }))?;
    let ran = reported(&home, &["--trace", "--workload", "short-text"], &["--cache-ram", "0"]).await?;
    assert_eq!(ran.code, 3, "{}", ran.all());
    let line = "short-text: host memory grows by 2.9 MiB a request";
    let text = file(&home, "report.md")?;
    assert!(text.contains("Which call sites") && text.contains(line), "{text}");
    let findings: Value = serde_json::from_str(&file(&home, "findings.json")?)?;
    assert_eq!(findings["trace"][0]["workload"], "short-text");
    assert!(
        findings["attribution"][0].as_str().is_some_and(|first| first.starts_with(line)),
        "{}",
        findings["attribution"]
    );
    Ok(())
}

#[tokio::test]
async fn a_report_says_no_more_than_was_seen_and_a_script_tells_when_nothing_is_answered() -> Outcome {
    let home = Home::with_fake(&json!({}))?;
    reported(&home, &["--workload", "short-text", "--requests", "3"], &["--cache-ram", "0"]).await?;
    let text = file(&home, "report.md")?;
    assert!(text.contains("too few readings to tell whether anything leaks under short-text"), "{text}");
    assert!(!text.contains("nothing leaks"), "{text}");
    // A server that answers nothing must not look steady.
    let script = home.path().join("out/reproduce.sh");
    let broken = std::fs::read_to_string(&script)?.replace("path=/v1/chat/completions", "path=/nowhere");
    std::fs::write(&script, broken)?;
    let mut home = home;
    let port = warden_rig::ports::free()?;
    home.env.insert("PORT".into(), port.to_string().into());
    let ran = home.run(Path::new("sh"), [script.to_string_lossy().as_ref(), "3"], PATIENCE).await?;
    assert_eq!(ran.code, 1, "{}", ran.all());
    assert!(
        ran.stderr.contains("request 0 failed: status 404") && ran.stderr.contains("3 of 3 requests failed"),
        "{}",
        ran.all()
    );
    Ok(())
}
