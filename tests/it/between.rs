//! `diagnose --between` in repositories of simulated servers: the search finds the planted commit, avoids
//! commits that do not build, and resumes after an interruption.

mod builds;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use warden_rig::process::Kid;
use warden_rig::real::SERVER_VARIABLE;
use warden_rig::warden::{SOON, Setup};
use warden_rig::{Context as _, Outcome, Trouble, binaries};

use crate::history::{History, sets, tools};

/// A search builds half a dozen servers and starts two dozen.
const LONG: Duration = Duration::from_secs(900);

/// Usual detector, but for smaller leaks: a fake varies by less than a MiB.
const DETECTOR: &str = "internal.growth.host_effect = \"4MiB\"\ninternal.growth.allowance_slack = \"4MiB\"\n\
                        internal.diagnose.settle = \"3ms\"\n";

/// No caches, so that memory is constant without a leak.
const PLAIN: &str =
    "args = [\"-np\", \"2\", \"--metrics\", \"--cache-ram\", \"0\", \"--ctx-checkpoints\", \"0\"]\n";

/// Few and short requests, for builds that differ by much.
const VISITS: &str = "internal.proof.rounds_most = 4\ninternal.proof.repeats = 2\ninternal.proof.answer = 8\n\
    internal.proof.prompt = 64\n";

/// A configuration, with the store's build tools.
fn setup() -> Result<(Setup, PathBuf), Trouble> {
    let mut setup = Setup::new()?.top(&format!("{DETECTOR}{VISITS}"));
    tools(&mut setup.home)?;
    // The second model has a configured server of its own.
    let script = json!({ "report": "none", "ms_per_token": 3 });
    let setup = setup.fake("m", &script, PLAIN)?.fake("other", &json!({}), PLAIN)?;
    let config = setup.home.file("warden.toml", setup.config())?;
    Ok((setup, config))
}

fn arguments(config: &Path, history: &History, range: &str, more: &[&str]) -> Vec<OsString> {
    let usual = ["--workload", "short-text", "--requests", "80"];
    plain_arguments(config, history, range, &[&usual[..], more].concat())
}

fn plain_arguments(config: &Path, history: &History, range: &str, more: &[&str]) -> Vec<OsString> {
    let own: Vec<OsString> = vec![
        "diagnose".into(),
        "--config".into(),
        config.into(),
        "--git".into(),
        history.folder.clone().into(),
        "--between".into(),
        range.into(),
    ];
    let usual = ["--model", "m", "--backend", "cpu"];
    own.into_iter().chain(usual.iter().chain(more).map(OsString::from)).collect()
}

/// Returns the output of a report's script, run from another folder and without llama-warden.
async fn reproduced(setup: &Setup, report: &Path) -> Result<String, Trouble> {
    let (port, script) = (warden_rig::ports::free()?, report.join("reproduce.sh"));
    let line = format!("cd / && PORT={port} sh '{}' 1", script.display());
    let ran = setup.home.run(Path::new("sh"), ["-c", line.as_str()], SOON * 2).await?;
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{}", ran.all());
    Ok(ran.stdout)
}

fn builds(setup: &Setup) -> usize {
    let folder = setup.home.path().join("data/between/builds");
    let all = std::fs::read_dir(folder).into_iter().flatten().flatten();
    all.filter(|entry| !entry.file_name().to_string_lossy().starts_with('.')).count()
}

#[tokio::test]
async fn the_commit_that_brought_a_leak_is_found_past_one_that_does_not_build_and_after_an_interrupt()
-> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let (setup, config) = setup()?;
    let leaks = sets("LEAK_KIB_PER_REQUEST", "2048");
    let history = History::new(
        setup.home.path().join("history"),
        &["", "", "", "    this is no C;", "", &leaks, &leaks],
    )?;
    let args = arguments(&config, &history, "b9000..b9006", &[]);
    let log = setup.home.path().join("first.log");
    let mut kid = Kid::start(&binaries::llama_warden()?, &args, &setup.home.env, setup.home.path(), log)?;
    // The search now knows both ends.
    kid.says("6 commits left", LONG).await?;
    // The garbage collection spares builds of a running search.
    let gc = setup.home.warden(["builds", "gc", "--between"], SOON).await?;
    assert!(gc.code == 1 && gc.stderr.contains("a search runs"), "{}", gc.all());
    kid.signal(Signal::INT);
    let code = kid.exit(SOON).await?;
    assert_eq!(code, 130, "{}", kid.output());
    assert!(kid.output().contains("interrupted; the same command continues from here"), "{}", kid.output());
    let report = setup.home.path().join("report");
    let more = ["--report", report.to_str().context("a path is text")?];
    let ran = setup.home.warden(arguments(&config, &history, "b9000..b9006", &more), LONG).await?;
    assert_eq!(ran.code, 0, "{}", ran.all());
    assert!(ran.stderr.contains("between: continues where it was, "), "{}", ran.all());
    let found = "brought the growth of host memory under short-text: server : change number 5";
    assert!(ran.stdout.starts_with("between: b9005 (") && ran.stdout.contains(found), "{}", ran.all());
    assert!(ran.stdout.contains("b9004 ("), "{}", ran.all());
    let broken = ran.stdout.lines().find(|line| line.starts_with("b9003")).context(ran.all())?;
    assert!(broken.contains("not known: "), "{broken}");
    assert_eq!(builds(&setup), 2, "those that matter are kept");
    let text = std::fs::read_to_string(report.join("report.md"))?;
    assert!(text.contains("## Which revision") && text.contains(found), "{text}");
    assert!(report.join("reproduce.sh").exists());
    // The search reruns nothing.
    let ran = setup.home.warden(arguments(&config, &history, "b9000..b9006", &["--json"]), SOON * 3).await?;
    let again: Value = serde_json::from_str(&ran.stdout).context(ran.all())?;
    assert_eq!(again["conclusion"]["outcome"], json!({ "kind": "found", "revision": 5 }), "{}", ran.all());
    assert!(!ran.stderr.contains(", next "), "{}", ran.all());
    Ok(())
}

#[tokio::test]
async fn the_commit_that_ended_a_crash_is_found() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let (setup, config) = setup()?;
    let dies = sets("FAULTS", "[{\\\"from\\\":9,\\\"do\\\":\\\"crash\\\"}]");
    let history = History::new(setup.home.path().join("history"), &[&dies, &dies, "", ""])?;
    let ran = setup.home.warden(arguments(&config, &history, "b9000..main", &[]), LONG).await?;
    assert_eq!(ran.code, 0, "{}", ran.all());
    assert!(ran.stdout.starts_with("between: b9002 ("), "{}", ran.all());
    assert!(
        ran.stdout.contains("ended the crash under short-text: server : change number 2"),
        "{}",
        ran.all()
    );
    Ok(())
}

#[tokio::test]
async fn ends_that_do_not_fit_are_told_before_anything_is_built() -> Outcome {
    let (setup, config) = setup()?;
    let history = History::new(setup.home.path().join("history"), &["", ""])?;
    for (range, says) in [
        ("b9001..b9000", "is no line: its beginning is not among the first parents of its end"),
        ("b9000..b9000", "both ends are the same commit"),
        ("b9000..b9999", "b9999"),
        ("b9000", "it takes two commits"),
    ] {
        let ran = setup.home.warden(arguments(&config, &history, range, &[]), SOON).await?;
        assert_eq!(ran.code, 2, "{range}: {}", ran.all());
        assert!(ran.stderr.contains(says), "{range}: {}", ran.all());
    }
    let ran = setup.home.warden(["diagnose", "--between", "b1..b2"], SOON).await?;
    assert!(ran.code == 2 && ran.stderr.contains("nothing to diagnose"), "{}", ran.all());
    let ran =
        setup.home.warden(arguments(&config, &history, "b9000..b9001", &["--model", "none"]), SOON).await?;
    assert_eq!(ran.code, 2, "{}", ran.all());
    assert_eq!(builds(&setup), 0);
    Ok(())
}

#[tokio::test]
async fn the_first_commit_that_changed_answers_is_found_and_that_another_one_did_is_told() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let (setup, config) = setup()?;
    let (other, third) = (sets("TOKEN_BYTES", "24"), sets("TOKEN_BYTES", "40"));
    let folder = setup.home.path().join("history");
    let history = History::new(folder, &["", "    this is no C;", "", &other, &other, &third, &third])?;
    let report = setup.home.path().join("report");
    let more = ["--for", "answers", "--report", report.to_str().context("a path is text")?];
    let ran = setup.home.warden(plain_arguments(&config, &history, "b9000..b9004", &more), LONG).await?;
    assert_eq!(ran.code, 0, "{}", ran.all());
    let found = |ran: &str| {
        ran.starts_with("between: b9003 (")
            && ran.contains("brought other answers to “text 1”, ")
            && ran.contains(": server : change number 3")
    };
    assert!(found(&ran.stdout), "{}", ran.all());
    assert!(
        ran.stdout.contains("b9002 (") && ran.stdout.contains("answers as the older end does"),
        "{}",
        ran.all()
    );
    assert!(!ran.stdout.contains("more than one revision"), "{}", ran.all());
    let text = std::fs::read_to_string(report.join("report.md"))?;
    assert!(
        text.contains("# Answers of llama-server") && text.contains("### What the ends answer"),
        "{text}"
    );
    let script = std::fs::read_to_string(report.join("reproduce.sh"))?;
    assert!(script.contains("brought other answers"), "{script}");
    let sent: Value = serde_json::from_slice(&std::fs::read(report.join("requests/0.json"))?)?;
    assert_eq!(sent["temperature"], 0, "{sent}");
    let shown = reproduced(&setup, &report).await?;
    assert!(shown.contains("request 0: status 200, ") && shown.contains("\"content\""), "{shown}");
    // The search reruns nothing.
    let again = plain_arguments(&config, &history, "b9000..b9004", &["--for", "answers", "--json"]);
    let ran = setup.home.warden(again, SOON * 3).await?;
    let told: Value = serde_json::from_str(&ran.stdout).context(ran.all())?;
    assert_eq!(told["conclusion"]["outcome"], json!({ "kind": "found", "revision": 3 }), "{}", ran.all());
    assert!(!ran.stderr.contains(", next "), "{}", ran.all());
    let ran = setup
        .home
        .warden(plain_arguments(&config, &history, "b9000..b9006", &["--for", "answers"]), LONG)
        .await?;
    assert_eq!(ran.code, 0, "{}", ran.all());
    assert!(
        found(&ran.stdout) && ran.stdout.contains("more than one revision changed answers"),
        "{}",
        ran.all()
    );
    let alike = plain_arguments(&config, &history, "b9003..b9004", &["--for", "answers"]);
    let ran = setup.home.warden(alike, LONG).await?;
    assert_eq!(ran.code, 5, "{}", ran.all());
    assert!(ran.stdout.contains("both ends answer the same"), "{}", ran.all());
    // `builds list` names the builds that searches left, and `builds gc --between` removes them.
    let told = format!("for searches: {} builds of `diagnose --between`, ", builds(&setup));
    let ran = setup.home.warden(["builds", "list"], SOON).await?;
    assert!(ran.stdout.contains("no builds in ") && ran.stdout.contains(&told), "{}", ran.all());
    let ran = setup.home.warden(["builds", "gc", "--between", "--dry-run"], SOON).await?;
    assert!(ran.code == 0 && ran.stdout.contains("that would free "), "{}", ran.all());
    let ran = setup.home.warden(["builds", "gc", "--between"], SOON).await?;
    assert!(ran.code == 0 && ran.stdout.contains("freed ") && builds(&setup) == 0, "{}", ran.all());
    let ran = setup.home.warden(["builds", "list"], SOON).await?;
    assert!(!ran.stdout.contains("for searches"), "{}", ran.all());
    // `gc` must not follow a link to a build that serves.
    let data = setup.home.path().join("data");
    std::fs::create_dir_all(data.join("builds"))?;
    std::fs::remove_dir_all(data.join("between/builds"))?;
    std::os::unix::fs::symlink(data.join("builds"), data.join("between/builds"))?;
    let ran = setup.home.warden(["builds", "gc", "--between"], SOON).await?;
    assert!(ran.code == 1 && ran.stderr.contains("leads to the builds that are served"), "{}", ran.all());
    Ok(())
}

#[tokio::test]
async fn the_commit_that_made_it_slower_is_found_and_the_one_that_ended_it() -> Outcome {
    if std::env::var_os(SERVER_VARIABLE).is_some() {
        return Ok(());
    }
    let (setup, config) = setup()?;
    let slow = sets("MS_PER_TOKEN", "30");
    let history = History::new(setup.home.path().join("history"), &["", "", "", &slow, &slow, "", ""])?;
    let report = setup.home.path().join("report");
    let more = ["--for", "slowdown", "--report", report.to_str().context("a path is text")?];
    let ran = setup.home.warden(plain_arguments(&config, &history, "b9000..b9004", &more), LONG).await?;
    assert_eq!(ran.code, 0, "{}", ran.all());
    assert!(ran.stdout.starts_with("between: b9003 ("), "{}", ran.all());
    let brought = "brought the slowdown of ";
    assert!(ran.stdout.contains(brought) && ran.stdout.contains("change number 3"), "{}", ran.all());
    let row = ran.stdout.lines().find(|line| line.starts_with("b9003")).context(ran.all())?;
    assert!(row.contains("ill: ") && row.contains(" % of the slowdown"), "{row}");
    let text = std::fs::read_to_string(report.join("report.md"))?;
    assert!(text.contains("# Speed of llama-server") && text.contains(brought), "{text}");
    let shown = reproduced(&setup, &report).await?;
    assert!(shown.contains("request 1: status 200, ") && shown.contains("\"predicted_ms\":"), "{shown}");
    let ended = plain_arguments(&config, &history, "b9004..main", &["--for", "slowdown"]);
    let ran = setup.home.warden(ended, LONG).await?;
    assert_eq!(ran.code, 0, "{}", ran.all());
    assert!(
        ran.stdout.starts_with("between: b9005 (") && ran.stdout.contains("ended the slowdown of "),
        "{}",
        ran.all()
    );
    Ok(())
}

#[tokio::test]
async fn a_search_that_needs_no_work_takes_none() -> Outcome {
    let (setup, config) = setup()?;
    let history = History::new(setup.home.path().join("history"), &["", ""])?;
    for (more, says) in [
        (
            &["--for", "answers", "--workload", "short-text"][..],
            "--workload says nothing of a slowdown or of answers",
        ),
        (&["--for", "slowdown", "--requests", "9"], "--requests says nothing"),
        (&["--for", "weather"], "weather"),
    ] {
        let ran = setup.home.warden(plain_arguments(&config, &history, "b9000..b9001", more), SOON).await?;
        assert_eq!(ran.code, 2, "{more:?}: {}", ran.all());
        assert!(ran.stderr.contains(says), "{more:?}: {}", ran.all());
    }
    assert_eq!(builds(&setup), 0);
    Ok(())
}
