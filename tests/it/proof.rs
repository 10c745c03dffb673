//! `diagnose --against` compares two llama-servers that differ in one point.

use std::ffi::OsString;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use warden_rig::home::Ran;
use warden_rig::process::Kid;
use warden_rig::warden::{SOON, Setup};
use warden_rig::{Context as _, Outcome, Trouble, binaries};

/// Limit for eight rounds of two processes and the search for growth.
const LONG: Duration = Duration::from_secs(300);

/// Short requests and few rounds, because two fakes differ by nothing or by much.
const NUMBERS: &str = "internal.proof.rounds_most = 4\ninternal.proof.repeats = 2\ninternal.proof.answer = 8\n\
    internal.proof.prompt = 64\ninternal.growth.host_effect = \"4MiB\"\ninternal.growth.allowance_slack = \"4MiB\"\n";

const PLAIN: &str =
    "args = [\"-np\", \"1\", \"--metrics\", \"--cache-ram\", \"0\", \"--ctx-checkpoints\", \"0\"]\n";

struct Two {
    setup: Setup,
    config: String,
}

impl Two {
    fn new() -> Result<Self, Trouble> {
        let setup = Setup::new()?.top(NUMBERS);
        let setup = setup.fake("m", &json!({ "report": "none", "ms_per_token": 3 }), PLAIN)?;
        let config = setup.home.file("w.toml", setup.config())?.display().to_string();
        Ok(Self { setup, config })
    }

    /// Writes a llama-server with these shell lines before fake-llama.
    fn server(&self, name: &str, lines: &str) -> Result<String, Trouble> {
        let fake = binaries::fake_llama()?.display().to_string();
        let path = self.setup.home.program(name, format!("#!/bin/sh\n{lines}\nexec '{fake}' \"$@\"\n"))?;
        Ok(path.display().to_string())
    }

    fn args<'a>(&'a self, old: &'a str, new: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        let own = ["diagnose", "--config", &self.config, "--against", old, "--binary", new, "--json"];
        own.into_iter().chain(more.iter().copied()).collect()
    }

    async fn prove(&self, new: &str, more: &[&str]) -> Result<(Ran, Value), Trouble> {
        let old = self.server("old", "")?;
        let new = self.server("new", new)?;
        let ran = self.setup.home.warden(self.args(&old, &new, more), LONG).await?;
        let report = serde_json::from_str(&ran.stdout).context(ran.all())?;
        Ok((ran, report))
    }
}

fn reasons(report: &Value) -> String {
    report["reasons"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect::<Vec<_>>()
        .join("\n")
}

#[tokio::test]
async fn a_build_that_does_the_same_may_take_the_place_of_the_old_one() -> Outcome {
    let two = Two::new()?;
    let (ran, report) = two.prove("", &["--workload", "short-text", "--requests", "80"]).await?;
    assert_eq!((ran.code, &report["verdict"]), (0, &json!("same")), "{}", ran.all());
    assert_eq!(report["proof"]["growth"]["ruling"], "same", "{}", ran.all());
    let answers = &report["proof"]["answers"];
    assert!(answers["asked"].as_u64() >= Some(8) && answers["asked"] == answers["equal"], "{answers}");
    assert!(report["proof"]["rounds"].as_u64() >= Some(3), "{}", ran.all());
    Ok(())
}

#[tokio::test]
async fn a_build_that_is_worse_in_one_thing_is_told_with_that_thing() -> Outcome {
    let two = Two::new()?;
    let slow = "export FAKE_LLAMA_MS_PER_TOKEN=40 FAKE_LLAMA_BASE_MIB=400 FAKE_LLAMA_BIND_MS=10000";
    let other = "export FAKE_LLAMA_TOKEN_BYTES=24\n\
        export FAKE_LLAMA_FAULTS='[{\"body_has\":\"json_object\",\"do\":\"error\"}]'";
    let crashes = "export FAKE_LLAMA_FAULTS='[{\"from\":6,\"do\":\"crash\"}]'";
    let dead = "export FAKE_LLAMA_FAIL=corrupt_model";
    for (lines, wanted) in [
        (slow, &["decode: ", "host memory, ready: "][..]),
        (other, &["answers: ", "“text 1”: ", "“schema”: refused by one of them"]),
        (crashes, &["the new build: it ended"]),
        (dead, &["the new build: it did not start"]),
    ] {
        let (ran, report) = two.prove(lines, &["--no-growth"]).await?;
        assert_eq!((ran.code, &report["verdict"]), (3, &json!("worse")), "{lines}: {}", ran.all());
        let reasons = reasons(&report);
        for reason in wanted {
            assert!(reasons.contains(reason), "{lines}: {reasons}");
        }
        if lines == slow {
            later(&report)?;
        }
    }
    Ok(())
}

/// Checks that the report shows the new build to start ten seconds later, or says why this cannot be known.
fn later(report: &Value) -> Outcome {
    let ratios = report["proof"]["ratios"].as_array().context("no ratios")?;
    let start = ratios.iter().find(|ratio| ratio["metric"] == "start").context("no start")?;
    let seconds = |which: &str| start[which].as_f64().unwrap_or_default();
    assert!(seconds("new") >= 10.0, "{start}");
    let is_told = start["ruling"] == "worse" && reasons(report).contains("start: ");
    assert!(is_told || (start["ruling"] == "unknown" && seconds("old") > 3.0), "{start}");
    Ok(())
}

#[tokio::test]
async fn a_build_that_leaks_where_the_old_one_does_not_is_worse() -> Outcome {
    let two = Two::new()?;
    let leaks = two.server("leaks", "export FAKE_LLAMA_LEAK_KIB_PER_REQUEST=2048")?;
    let steady = two.server("steady", "")?;
    let more = ["--workload", "short-text", "--requests", "80"];
    let ran = two.setup.home.warden(two.args(&steady, &leaks, &more), LONG).await?;
    let report: Value = serde_json::from_str(&ran.stdout).context(ran.all())?;
    assert_eq!(ran.code, 3, "{}", ran.all());
    assert!(
        reasons(&report).contains("it brings the growth of host memory under short-text"),
        "{}",
        ran.all()
    );
    Ok(())
}

#[tokio::test]
async fn an_old_build_that_fails_proves_nothing_and_bad_input_is_told_before_anything_runs() -> Outcome {
    let two = Two::new()?;
    let fails = two.server("fails", "export FAKE_LLAMA_FAIL=corrupt_model")?;
    let good = two.server("good", "")?;
    let ran = two.setup.home.warden(two.args(&fails, &good, &["--no-growth"]), LONG).await?;
    let report: Value = serde_json::from_str(&ran.stdout).context(ran.all())?;
    assert_eq!((ran.code, &report["verdict"]), (5, &json!("unknown")), "{}", ran.all());
    for (args, says) in [
        (two.args(&good, &good, &[]), "both are "),
        (two.args("nowhere/llama-server", &good, &[]), "nowhere/llama-server"),
        (two.args("0123abcd", &good, &[]), "0123abcd"),
        (two.args(&fails, &good, &["--bisect"]), "cannot be used with"),
        (two.args(&fails, &good, &["--no-growth", "--workload", "short-text"]), "cannot be used with"),
    ] {
        let ran = two.setup.home.warden(&args, SOON).await?;
        assert_eq!(ran.code, 2, "{args:?}: {}", ran.all());
        assert!(ran.stderr.contains(says), "{args:?}: {}", ran.all());
    }
    Ok(())
}

#[tokio::test]
async fn an_interrupt_ends_it_with_what_is_known_and_leaves_no_process() -> Outcome {
    let two = Two::new()?;
    let (old, new) = (two.server("old", "")?, two.server("new", "export FAKE_LLAMA_LOAD_MS=600000")?);
    let log = two.setup.home.path().join("log");
    let args: Vec<OsString> =
        two.args(&old, &new, &["--no-growth"]).into_iter().map(OsString::from).collect();
    let mut kid =
        Kid::start(&binaries::llama_warden()?, &args, &two.setup.home.env, two.setup.home.path(), log)?;
    kid.says("round 1: the new build", LONG).await?;
    kid.signal(Signal::INT);
    assert_eq!(kid.exit(SOON).await?, 130, "{}", kid.output());
    assert!(kid.output().contains("\"interrupted\": true"), "{}", kid.output());
    Ok(())
}
