//! `llama-warden diagnose` finds every kind of leak, blames the right unit of work, and raises no false
//! alarm. An interrupted experiment reports its results.

use std::ffi::OsString;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use warden_builder::sample_model::SamplePreset;
use warden_rig::home::Ran;
use warden_rig::process::Kid;
use warden_rig::real::{REPRODUCIBLE, llama_server, sample_model};
use warden_rig::real_weights;
use warden_rig::warden::{SOON, Setup};
use warden_rig::{Context as _, Home, Outcome, Trouble, binaries};

const PATIENCE: Duration = Duration::from_secs(600);

const CRASHES: i32 = 4;
const TOO_FEW: i32 = 5;

async fn diagnose(home: &Home, args: &[&str], flags: &[&str]) -> Result<Ran, Trouble> {
    let fake = binaries::fake_llama()?.to_string_lossy().into_owned();
    let first = ["diagnose", "--binary", &fake];
    let all = first.iter().chain(args).chain(&["--", "-m", "model.gguf"]).chain(flags);
    home.warden(all, PATIENCE).await
}

async fn report(script: &Value, workloads: &str, flags: &[&str]) -> Result<(Value, i32), Trouble> {
    let home = Home::with_fake(script)?;
    let ran = diagnose(&home, &["--json", "--workload", workloads], flags).await?;
    let mut json: Value = serde_json::from_str(&ran.stdout).context(ran.all())?;
    // Hundreds of readings would bury the message of a failed test.
    for leg in json["legs"].as_array_mut().context("legs")? {
        leg["readings"] = Value::Null;
    }
    Ok((json, ran.code))
}

fn host<'a>(report: &'a Value, workload: &str) -> &'a Value {
    let legs = report["legs"].as_array().map(Vec::as_slice).unwrap_or_default();
    let leg = legs.iter().find(|leg| leg["workload"] == workload);
    leg.map_or(&Value::Null, |leg| &leg["series"][0])
}

/// Runs legs with a server that leaks `kib` per unit: the legs `leaking` find and blame it, the legs `clean`
/// do not.
async fn found(field: &str, kib: u64, unit: &str, clean: &[&str], leaking: &[&str]) -> Outcome {
    let workloads = [clean, leaking].concat().join(",");
    let (report, code) =
        report(&json!({ field: kib }), &workloads, &["--mmproj", "model.gguf", "--cache-ram", "0"]).await?;
    assert_eq!((code, &report["leaks"]), (3, &json!(true)), "{report}");
    for workload in clean {
        assert_eq!(host(&report, workload)["verdict"], "steady", "{workload}");
    }
    for workload in leaking {
        let host = host(&report, workload);
        assert_eq!(host["verdict"], "leaking", "{workload}: {host}");
        assert_eq!(
            (&host["blame"]["kind"], &host["blame"]["unit"]),
            (&json!("pays"), &json!(unit)),
            "{host}"
        );
        let bytes = host["blame"]["bytes_per_unit"].as_f64().unwrap_or(0.0);
        assert!((bytes / 1024.0 / f64::from(u32::try_from(kib)?) - 1.0).abs() < 0.1, "{host}");
    }
    Ok(())
}

#[tokio::test]
async fn a_leak_for_each_request_is_found_and_blamed_on_requests() -> Outcome {
    found("leak_kib_per_request", 3000, "request", &[], &["short-text", "output-lengths", "same-image"]).await
}

#[tokio::test]
async fn a_leak_for_each_image_is_found_and_blamed_on_images() -> Outcome {
    found("leak_kib_per_image", 4500, "image", &["short-text"], &["same-image", "image-sizes"]).await
}

#[tokio::test]
async fn a_leak_for_each_prompt_token_is_found_and_blamed_on_prompt_tokens() -> Outcome {
    found("leak_kib_per_prompt_token", 12, "prompt_token", &[], &["distinct-prompts", "prefill-sweep"]).await
}

#[tokio::test]
async fn a_leak_for_each_output_token_is_found_and_blamed_on_output_tokens() -> Outcome {
    found("leak_kib_per_token", 64, "output_token", &["embeddings"], &["short-text", "output-lengths"]).await
}

#[tokio::test]
async fn a_leak_for_each_audio_clip_is_found_and_blamed_on_audio() -> Outcome {
    found("leak_kib_per_audio", 4000, "audio", &["short-text"], &["audio"]).await
}

#[tokio::test]
async fn a_clean_server_is_steady_whatever_it_does_and_conversations_use_all_slots() -> Outcome {
    let workloads = "short-text,conversation,distinct-prompts";
    let (report, code) = report(&json!({}), workloads, &["-np", "3"]).await?;
    assert_eq!((code, &report["leaks"]), (0, &json!(false)), "{report}");
    for leg in report["legs"].as_array().context("legs")? {
        assert_eq!(leg["series"][0]["verdict"], "steady", "{leg}");
        assert_eq!(leg["ended"]["kind"], "early", "{leg}");
        let each = if leg["workload"] == "conversation" { 3 } else { 1 };
        assert_eq!(leg["requests"].as_u64(), leg["steps"].as_u64().map(|steps| steps * each), "{leg}");
    }
    Ok(())
}

#[tokio::test]
async fn a_prompt_cache_that_fills_is_bounded_and_growth_of_the_start_is_steady() -> Outcome {
    let script = json!({ "cache_kib_per_prompt_token": 6, "buffer_kib_per_prompt_token": 40 });
    let flags = ["--cache-ram", "1024"];
    let (report, code) = report(&script, "short-text,distinct-prompts", &flags).await?;
    assert_eq!(code, 0, "{report}");
    assert_eq!(host(&report, "distinct-prompts")["verdict"], "bounded", "{report}");
    assert_eq!(host(&report, "distinct-prompts")["settles"]["settles"], "unknown", "{report}");
    assert!(host(&report, "distinct-prompts")["pooled_per_request"].as_f64() > Some(1e6), "{report}");
    let keeps = report["legs"][0]["may_keep"].to_string();
    assert!(keeps.contains("prompt cache: 1.0 GiB"), "{keeps}");
    Ok(())
}

#[tokio::test]
async fn what_a_server_cannot_do_is_listed_with_the_reason_and_the_table_is_for_people() -> Outcome {
    let home = Home::with_fake(&json!({ "leak_kib_per_request": 4000 }))?;
    let args = ["--workload", "short-text,same-image,audio"];
    let ran = diagnose(&home, &args, &[]).await?;
    assert_eq!(ran.code, 3, "{ran:?}");
    let lines: Vec<&str> = ran.stdout.lines().collect();
    assert!(lines[0].starts_with("WORKLOAD") && lines[0].ends_with("BLAME"), "{ran:?}");
    // The size of the prompt cache is not reported, so a second leg runs without it.
    assert!(lines[1].starts_with("short-text") && lines[1].contains("bounded"), "{ran:?}");
    let told = lines.iter().find(|line| line.starts_with("short-text (no cache)")).context("a line")?;
    assert!(told.contains("+3.91 MiB") && told.contains("leaking") && told.contains("no"), "{told}");
    for workload in ["same-image", "audio"] {
        let line = lines.iter().find(|line| line.starts_with(workload)).context(workload)?;
        assert!(line.contains("not run: the server takes no"), "{line}");
    }
    assert!(ran.stderr.contains("short-text (1 of 3)"), "{ran:?}");
    Ok(())
}

#[tokio::test]
async fn interrupted_it_shows_the_table_so_far_and_leaves_nothing_behind() -> Outcome {
    let home = Home::with_fake(&json!({ "ms_per_token": 2.0 }))?;
    let fake: OsString = binaries::fake_llama()?.into();
    let mut args: Vec<OsString> = vec!["diagnose".into(), "--binary".into(), fake];
    let rest = ["--workload", "short-text,long-text", "--requests", "100000", "--", "-m", "model.gguf"];
    args.extend(rest.map(OsString::from));
    let log = home.path().join("log");
    let mut kid = Kid::start(&binaries::llama_warden()?, &args, &home.env, home.path(), log)?;
    kid.says("short-text 1/100000", SOON).await?;
    let children = kid.children();
    assert_eq!(children.len(), 1);
    kid.signal(Signal::INT);
    assert_eq!(kid.exit(SOON).await?, 130, "{}", kid.output());
    let output = kid.output();
    assert!(output.contains("\nWORKLOAD") && output.contains("short-text: interrupted"), "{output}");
    assert!(!output.contains("long-text ("), "{output}");
    assert!(!children[0].is_alive());
    Ok(())
}

#[tokio::test]
async fn a_crash_in_the_middle_is_told_with_its_cause_and_the_next_leg_is_run() -> Outcome {
    let home = Home::with_fake(
        &json!({ "faults": [{ "at": 12, "do": "crash", "signal": 11, "after_tokens": 3 }] }),
    )?;
    let ran = diagnose(&home, &["--workload", "short-text,long-text"], &[]).await?;
    assert_eq!(ran.code, CRASHES, "{ran:?}");
    for workload in ["short-text", "long-text"] {
        let start =
            format!("the server crashed under {workload} at request 12, every time (5 of 5 further runs)");
        let note = ran.stdout.lines().find(|line| line.starts_with(&start));
        assert!(note.is_some_and(|note| note.contains("SIGSEGV")), "{ran:?}");
        let runs = format!("{workload}: the same in fresh processes: died at request 12, 12, 12, 12 and 12");
        assert!(ran.stdout.contains(&runs), "{ran:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_crash_that_does_not_come_again_is_told_as_such_with_the_last_lines_of_the_server() -> Outcome {
    let folder = tempfile::tempdir()?;
    let fault = json!({ "at": 4, "do": "crash", "once": folder.path().join("once") });
    let home = Home::with_fake(&json!({ "stderr": ["one thing", "and another"], "faults": [fault] }))?;
    let args = ["--workload", "short-text", "--requests", "12", "--json"];
    let ran = diagnose(&home, &args, &[]).await?;
    assert_eq!(ran.code, CRASHES, "{ran:?}");
    let report: Value = serde_json::from_str(&ran.stdout).context(ran.all())?;
    let crash = &report["legs"][0]["crash"];
    assert_eq!((&crash["at_request"], &crash["again"]), (&json!(4), &json!("not_again")), "{crash}");
    assert!(
        crash["runs"].as_array().is_some_and(|runs| runs.iter().all(|run| run["died"] == false)),
        "{crash}"
    );
    assert!(crash["lines"].as_array().is_some_and(|lines| lines.contains(&json!("and another"))), "{crash}");
    Ok(())
}

#[tokio::test]
async fn a_server_that_somebody_else_ends_has_not_crashed() -> Outcome {
    // The kernel ends a process like this if memory runs out.
    let home = Home::with_fake(&json!({ "faults": [{ "at": 6, "do": "crash", "signal": 9 }] }))?;
    let ran = diagnose(&home, &["--workload", "short-text,long-text"], &[]).await?;
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.stdout.contains("short-text: ended: the server was killed from outside"), "{ran:?}");
    assert!(ran.stdout.contains("long-text: ended: the server was killed from outside"), "{ran:?}");
    assert!(!ran.all().contains("crashed"), "{ran:?}");
    Ok(())
}

#[tokio::test]
async fn an_experiment_that_is_too_short_says_how_many_requests_would_do_and_has_an_exit_code_of_its_own()
-> Outcome {
    let home = Home::with_fake(&json!({}))?;
    let ran = diagnose(&home, &["--workload", "short-text", "--requests", "20"], &[]).await?;
    assert_eq!(ran.code, TOO_FEW, "{ran:?}");
    assert!(!ran.stdout.contains("steady"), "{ran:?}");
    assert!(ran.stderr.contains("warning: 20 requests are too few for a verdict"), "{ran:?}");
    let told = ran.stdout.lines().find(|line| line.starts_with("short-text host: too few readings"));
    let Some((_, number)) = told.and_then(|line| line.split_once("--requests ")) else { panic!("{ran:?}") };
    let number = number.trim_end_matches(|c: char| !c.is_ascii_digit()).to_owned();
    let ran = diagnose(&home, &["--workload", "short-text", "--requests", &number], &[]).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    Ok(())
}

#[tokio::test]
async fn a_server_that_does_not_start_says_why() -> Outcome {
    let home = Home::with_fake(&json!({ "fail": "corrupt_model" }))?;
    let ran = diagnose(&home, &["--workload", "short-text"], &[]).await?;
    assert_eq!(ran.code, 1, "{ran:?}");
    assert!(ran.stderr.contains("error: the server did not start: the model could not be loaded"), "{ran:?}");
    Ok(())
}

#[tokio::test]
async fn a_model_of_the_configuration_is_run_as_it_is_configured() -> Outcome {
    let lines = "mitigations = [\"malloc-arenas=2\"]\nargs = [\"-np\", \"1\", \"--cache-ram\", \"0\"]\n";
    let setup = Setup::new()?.fake("m", &json!({ "leak_kib_per_request": 4000 }), lines)?;
    let config = setup.home.file("w.toml", setup.config())?.to_string_lossy().into_owned();
    let args = ["diagnose", "--config", &config, "--model", "m", "--workload", "conversation", "--json"];
    let ran = setup.home.warden(args, PATIENCE).await?;
    let report: Value = serde_json::from_str(&ran.stdout).context(ran.all())?;
    assert_eq!((ran.code, &report["about"]["model"]), (3, &json!("m")), "{report}");
    let env = report["about"]["env"].to_string();
    assert!(env.contains("MALLOC_ARENA_MAX"), "{env}");
    assert_eq!(report["legs"][0]["requests"], report["legs"][0]["steps"], "one slot, one conversation");
    let ran = setup.home.warden(["diagnose", "--config", &config, "--model", "x"], SOON).await?;
    assert_eq!(ran.code, 2, "{ran:?}");
    assert!(ran.stderr.contains("the models are: m"), "{ran:?}");
    Ok(())
}

#[tokio::test]
async fn on_a_real_server_text_is_steady_and_a_prompt_cache_is_bounded() -> Outcome {
    let home = Home::new()?;
    let (server, model) = (llama_server().await?, sample_model(SamplePreset::FatKv)?);
    let (server, model) = (server.to_string_lossy().into_owned(), model.to_string_lossy().into_owned());
    let args = ["diagnose", "--binary", &server, "--json", "--workload"];
    let flags = ["--", "-m", &model, "-np", "1", "-c", "2048"];
    let legs = async |workloads: &str, cache: &str| {
        let all = args.iter().chain([&workloads]).chain(&flags).chain(&REPRODUCIBLE);
        let ran = home.warden(all.chain(&["--cache-ram", cache]), PATIENCE).await?;
        let report: Value = serde_json::from_str(&ran.stdout).context(ran.all())?;
        assert_eq!(ran.code, 0, "{report}");
        Ok::<Value, Trouble>(report)
    };
    // Filling a prompt cache takes many prompts, so that part runs only at night.
    let workloads: &[&str] =
        if warden_rig::is_long() { &["short-text", "distinct-prompts"] } else { &["short-text"] };
    let without = legs(&workloads.join(","), "0").await?;
    for workload in workloads {
        assert_eq!(host(&without, workload)["verdict"], "steady", "{workload}: {without}");
    }
    if !warden_rig::is_long() {
        return Ok(());
    }
    let with = legs("distinct-prompts", "2048").await?;
    assert_eq!(host(&with, "distinct-prompts")["verdict"], "bounded", "{with}");
    Ok(())
}

#[tokio::test]
async fn a_model_with_trained_weights_is_steady() -> Outcome {
    let Some(model) = real_weights::smollm2().await? else { return Ok(()) };
    let home = Home::new()?;
    let (server, model) = (llama_server().await?, model.to_string_lossy().into_owned());
    let server = server.to_string_lossy().into_owned();
    let args = ["diagnose", "--binary", &server, "--json", "--workload", "short-text", "--", "-m", &model];
    let flags = ["-np", "1", "-c", "2048", "-t", "1", "--cache-ram", "0"];
    let ran = home.warden(args.iter().chain(&flags), PATIENCE).await?;
    let report: Value = serde_json::from_str(&ran.stdout).context(ran.all())?;
    assert_eq!((ran.code, &report["leaks"]), (0, &json!(false)), "{report}");
    assert_eq!(host(&report, "short-text")["verdict"], "steady", "{report}");
    // Answers have more than a few tokens, and no request failed.
    let work = &report["legs"][0]["work"];
    assert!(
        work["output_tokens"].as_u64() > work["requests"].as_u64().map(|requests| 2 * requests),
        "{work}"
    );
    Ok(())
}
