//! `llama-warden diagnose --isolation` shows if a server mixes conversations, which ones, and what stops that.
//! It raises no alarm about noise, and the script of its report shows the same without llama-warden.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use warden_builder::sample_model::SamplePreset;
use warden_rig::home::Ran;
use warden_rig::process::Kid;
use warden_rig::real::{llama_server, sample_model};
use warden_rig::warden::{SOON, Setup};
use warden_rig::{Context as _, Outcome, Trouble, binaries};

/// Limit for three to six short processes, or scripts, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(240);

const MIXED: i32 = 3;
const UNDECIDED: i32 = 5;

/// Configuration with a fake of three slots.
struct Bench {
    setup: Setup,
    config: PathBuf,
}

impl Bench {
    fn new(script: &Value) -> Result<Self, Trouble> {
        let setup = Setup::new()?.fake("m", script, "args = [\"-np\", \"3\"]\n")?;
        let config = setup.home.file("w.toml", setup.config())?;
        Ok(Self { setup, config })
    }

    fn args<'a>(&'a self, more: &[&'a str]) -> Vec<&'a str> {
        let config = self.config.to_str().unwrap_or_default();
        let own = ["diagnose", "--isolation", "--config", config, "--json"];
        own.into_iter().chain(more.iter().copied()).collect()
    }

    async fn run(&self, more: &[&str]) -> Result<(Ran, Value), Trouble> {
        let ran = self.setup.home.warden(self.args(more), PATIENCE).await?;
        let report: Value = serde_json::from_str(&ran.stdout).context(ran.all())?;
        Ok((ran, report["isolation"].clone()))
    }
}

#[tokio::test]
async fn a_server_that_mixes_conversations_is_found_with_their_numbers() -> Outcome {
    let bench = Bench::new(&json!({ "chances": 0.01, "mixes": 9 }))?;
    let (ran, report) = bench.run(&[]).await?;
    let found = &report["finding"];
    assert_eq!((ran.code, &found["result"]), (MIXED, &json!("mixed")), "{}", ran.all());
    let foreign = found["foreign"].as_array().context("foreign")?;
    // Fewer than every ninth: a slot may have had the same conversation before.
    assert!((6..=12).contains(&foreign.len()), "{report}");
    for one in foreign {
        // Requests at the same time arrive in any order.
        let is_due = one["request"].as_u64().map(|request| request % 9) == Some(0);
        assert!(is_due || one["concurrent"] == true, "{one}");
        assert_ne!(one["place"]["conversation"], one["fits"]["place"]["conversation"], "{one}");
        assert!(
            one["fits"]["distance"].as_f64() < Some(0.1) && one["distance"].as_f64() > Some(1.0),
            "{one}"
        );
    }
    let untried = report["not_tried"].as_array().context("not tried")?;
    assert!(untried.iter().any(|one| one["why"] == "`--bisect` tries it"), "{report}");
    Ok(())
}

#[tokio::test]
async fn a_server_that_keeps_conversations_apart_is_called_separate() -> Outcome {
    let bench = Bench::new(&json!({ "chances": 0.01 }))?;
    let (ran, report) = bench.run(&["--requests", "40"]).await?;
    let found = &report["finding"];
    assert_eq!((ran.code, &found["result"]), (0, &json!("separate")), "{}", ran.all());
    assert_eq!(found["foreign"], json!([]), "{report}");
    assert!(found["answers"].as_u64() >= Some(40) && found["answers"] == found["telling"], "{report}");
    assert!(found["conversations"].as_u64() > found["slots"].as_u64(), "{report}");
    let finds = found["finds"].as_f64().context("finds")?;
    assert!(finds > 0.05 && finds < 0.08, "{report}");
    let noise = found["scales"]["alone"]["most"].as_f64().context("noise")?;
    assert!(noise > 0.0 && noise < 0.03, "{report}");
    Ok(())
}

#[tokio::test]
async fn what_cannot_be_judged_is_undecided_and_says_why() -> Outcome {
    let (ran, report) = Bench::new(&json!({}))?.run(&[]).await?;
    assert_eq!((ran.code, &report["finding"]["result"]), (UNDECIDED, &json!("undecided")), "{}", ran.all());
    assert!(
        report["finding"]["why"].as_str().is_some_and(|why| why.contains("no log probabilities")),
        "{report}"
    );
    // A server that dies under the requests.
    let crash = json!([{ "from": 20, "do": "crash" }]);
    let (ran, report) = Bench::new(&json!({ "chances": 0.01, "faults": crash }))?.run(&[]).await?;
    assert_eq!(ran.code, 1, "{}", ran.all());
    assert!(
        report["finding"]["why"].as_str().is_some_and(|why| why.contains("the server ended")),
        "{report}"
    );
    Ok(())
}

#[tokio::test]
async fn the_switch_that_stops_it_is_found_and_named() -> Outcome {
    let script = json!({ "chances": 0.01, "mixes": 5, "stopped_by": { "mixes": ["--cache-ram=0"] } });
    let (ran, report) = Bench::new(&script)?.run(&["--bisect"]).await?;
    assert_eq!(ran.code, MIXED, "a cure that is known is not applied: {}", ran.all());
    let effect = |item: &str| {
        let all = report["cures"].as_array().into_iter().flatten();
        all.filter(|cure| cure["item"] == item).map(|cure| cure["effect"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(effect("no-cache-idle-slots"), [json!("nothing")], "{report}");
    assert_eq!(effect("cache-ram=0"), [json!("stops")], "{report}");
    assert_eq!(effect("request.default = { cache_prompt = false }"), [json!("stops")], "{report}");
    Ok(())
}

#[tokio::test]
async fn the_script_of_the_report_shows_it_without_us() -> Outcome {
    let mut bench = Bench::new(&json!({ "chances": 0.01, "mixes": 9 }))?;
    let folder = bench.setup.home.path().join("out");
    let (ran, report) = bench.run(&["--report", folder.to_str().unwrap_or_default()]).await?;
    assert_eq!(ran.code, MIXED, "{}", ran.all());
    let text = std::fs::read_to_string(folder.join("report.md"))?;
    assert!(
        text.starts_with("# llama-server mixes conversations\n") && text.contains("## Which answers"),
        "{text}"
    );
    let port = warden_rig::ports::free()?;
    bench.setup.home.env.insert("PORT".into(), port.to_string().into());
    let script = folder.join("reproduce.sh").to_string_lossy().into_owned();
    let ran = bench.setup.home.run(Path::new("sh"), [script.as_str()], PATIENCE).await?;
    assert_eq!((ran.code, ran.stderr.as_str()), (0, ""), "{}", ran.all());
    let answers = report["finding"]["answers"].as_u64().context("answers")?;
    let last = ran.stdout.lines().last().context("no lines")?;
    let wrong =
        last.strip_suffix(&format!(" of {answers} answers are not the right ones")).context(ran.all())?;
    assert!((6..=12).contains(&wrong.parse::<u32>()?), "{}", ran.all());
    assert!(ran.stdout.contains("nats from the right answer; nearest: conversation "), "{}", ran.all());
    Ok(())
}

#[tokio::test]
async fn an_interrupt_ends_it_and_other_experiments_are_refused_with_it() -> Outcome {
    let bench = Bench::new(&json!({ "chances": 0.01, "ms_per_token": 50 }))?;
    for more in [["--workload", "short-text"], ["--between", "b1..b2"], ["--against", "x"]] {
        let ran = bench.setup.home.warden(bench.args(&more), SOON).await?;
        assert_eq!(ran.code, 2, "{}", ran.all());
    }
    let home = &bench.setup.home;
    let args: Vec<OsString> = bench.args(&[]).into_iter().map(OsString::from).collect();
    let log = home.path().join("log");
    let mut kid = Kid::start(&binaries::llama_warden()?, &args, &home.env, home.path(), log)?;
    kid.says("isolation: the right answers", SOON).await?;
    kid.signal(Signal::INT);
    assert_eq!(kid.exit(SOON).await?, 130, "{}", kid.output());
    assert!(kid.output().contains("\"interrupted\": true"), "{}", kid.output());
    Ok(())
}

/// A real llama-server at its default settings, except for the number of slots.
async fn real(model: &Path, requests: &str) -> Outcome {
    let server = llama_server().await?.display().to_string();
    let setup = Setup::new()?;
    let model = model.display().to_string();
    let args = ["diagnose", "--isolation", "--json", "--binary", &server, "--requests", requests, "--"];
    let flags = ["-m", &model, "-np", "2", "-c", "2048"];
    let ran = setup.home.warden(args.iter().chain(&flags), PATIENCE).await?;
    let report: Value = serde_json::from_str(&ran.stdout).context(ran.all())?;
    let found = &report["isolation"]["finding"];
    assert_eq!((ran.code, &found["result"]), (0, &json!("separate")), "{}", ran.all());
    // Prompts were reused: else nothing was tested.
    assert!(found["scales"]["apart"].as_f64() > Some(0.1), "{report}");
    Ok(())
}

#[tokio::test]
async fn the_pinned_llama_server_keeps_conversations_of_a_random_model_apart() -> Outcome {
    real(&sample_model(SamplePreset::Chat)?, "60").await
}
