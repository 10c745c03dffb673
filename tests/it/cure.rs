//! `diagnose --bisect` and `--report` with a fake whose leaks have known cures: the report names exactly the
//! switches that cure, their cost and configuration.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};
use warden_rig::home::Ran;
use warden_rig::warden::Setup;
use warden_rig::{Context as _, FakeGpu, FakeNvml, Outcome, Trouble};

/// A bisection starts a dozen servers or more, each for some seconds.
const LONG: Duration = Duration::from_secs(900);

/// Usual detector, but for smaller leaks: a fake varies by less than a MiB.
const DETECTOR: &str = "internal.growth.host_effect = \"4MiB\"\ninternal.growth.allowance_slack = \"4MiB\"\n\
                        internal.diagnose.settle = \"3ms\"\n";

/// No caches, and no slow start.
const PLAIN: &str = "args = [\"-np\", \"2\", \"--metrics\", \"--cache-ram\", \"0\", \"--ctx-checkpoints\", \"0\", \"--mmproj\", \"p\"]\n";

const LEAKS: i32 = 3;
const CRASHES: i32 = 4;

/// A fake that reports its VRAM to a simulated GPU.
struct Bench {
    setup: Setup,
    config: PathBuf,
    _nvml: FakeNvml,
}

impl Bench {
    fn new(mut script: Value, toml: &str) -> Result<Self, Trouble> {
        let mut setup = Setup::new()?.top(DETECTOR);
        let nvml = FakeNvml::in_home(&mut setup.home)?;
        nvml.say(&[FakeGpu { total: 80 << 30, ..FakeGpu::default() }])?;
        script["vram_told"] = json!(nvml.script());
        script["vram_base_mib"] = json!(512);
        // The fake's report of pools does not match its VRAM.
        script["report"] = json!("none");
        let setup = setup.fake("m", &script, toml)?;
        let config = setup.home.file("warden.toml", setup.config())?;
        Ok(Self { setup, config, _nvml: nvml })
    }

    async fn run(&self, args: &[&str]) -> Result<Ran, Trouble> {
        let config = self.config.display().to_string();
        let all = ["diagnose", "--config", &config].into_iter().chain(args.iter().copied());
        self.setup.home.warden(all, LONG).await
    }

    async fn report(&self, args: &[&str]) -> Result<(Value, Ran), Trouble> {
        let all: Vec<&str> = args.iter().copied().chain(["--json"]).collect();
        let ran = self.run(&all).await?;
        let json = serde_json::from_str(&ran.stdout).context(format!("the report as JSON: {}", ran.all()))?;
        Ok((json, ran))
    }
}

fn cure(report: &Value) -> Vec<String> {
    let switches = &report["cure"]["switches"];
    let all = report["cure"]["conclusion"]["cure"].as_array().cloned().unwrap_or_default();
    let name = |at: &Value| switches[usize::try_from(at.as_u64()?).ok()?]["item"].as_str().map(str::to_owned);
    all.iter().filter_map(name).collect()
}

const IMAGES: [&str; 5] = ["--bisect", "--workload", "same-image", "--requests", "80"];
const TEXTS: [&str; 5] = ["--bisect", "--workload", "short-text", "--requests", "80"];

async fn cured_by(field: &str, kib: u64, word: &str, args: &[&str], expected: &str) -> Outcome {
    let bench = Bench::new(json!({field: kib, "stopped_by": {field: [word]}}), PLAIN)?;
    let (report, ran) = bench.report(args).await?;
    assert_eq!(report["cure"]["conclusion"]["outcome"]["kind"], "cured", "{}", ran.all());
    assert_eq!(cure(&report), [expected], "{}", ran.all());
    assert_eq!(ran.code, LEAKS, "a cure that is known is not applied: {}", ran.all());
    Ok(())
}

#[tokio::test]
async fn a_leak_per_image_is_cured_by_the_variable_that_cures_it_and_by_no_other() -> Outcome {
    cured_by("leak_kib_per_image", 1024, "GGML_CUDA_DISABLE_GRAPHS", &IMAGES, "no-cuda-graphs").await
}

#[tokio::test]
async fn a_leak_per_request_is_cured_by_fewer_arenas_where_those_cure_it() -> Outcome {
    cured_by("leak_kib_per_request", 1024, "MALLOC_ARENA_MAX", &TEXTS, "malloc-arenas").await
}

#[tokio::test]
async fn a_leak_per_output_token_is_cured_by_a_flag_where_that_cures_it() -> Outcome {
    cured_by("leak_kib_per_token", 32, "--threads-http=8", &TEXTS, "http-threads=8").await
}

#[tokio::test]
async fn host_and_vram_may_need_two_switches_and_what_is_useless_is_not_named() -> Outcome {
    let script = json!({
        "leak_kib_per_request": 1024, "vram_kib_per_request": 1024,
        "stopped_by": {
            "leak_kib_per_request": ["MALLOC_ARENA_MAX"],
            "vram_kib_per_request": ["GGML_CUDA_DISABLE_GRAPHS"],
        },
    });
    let bench = Bench::new(script, PLAIN)?;
    let (report, ran) = bench.report(&TEXTS).await?;
    let mut both = cure(&report);
    both.sort();
    assert_eq!(both, ["malloc-arenas", "no-cuda-graphs"], "{}", ran.all());
    let by_track = report["cure"]["conclusion"]["by_track"].as_array().cloned().unwrap_or_default();
    assert_eq!(by_track.len(), 2, "{by_track:?}");
    assert!(by_track.iter().all(|one| one[1].as_array().is_some_and(|set| set.len() == 1)), "{by_track:?}");
    Ok(())
}

#[tokio::test]
async fn a_cure_is_told_with_its_cost_and_the_line_to_write() -> Outcome {
    let script = json!({
        "leak_kib_per_image": 1024, "ms_per_token": 0.5,
        "stopped_by": {"leak_kib_per_image": ["GGML_CUDA_DISABLE_GRAPHS"]},
        "slowed_by": {"GGML_CUDA_DISABLE_GRAPHS": 4.0},
    });
    let bench = Bench::new(script, PLAIN)?;
    let ran = bench.run(&IMAGES).await?;
    assert!(ran.stdout.contains("`no-cuda-graphs` stops the growth of host"), "{}", ran.all());
    let cost = ran.stdout.lines().find(|line| line.contains("its cost: ")).unwrap_or_default();
    let share = cost.split_once("its cost: tokens per second -").and_then(|(_, rest)| rest.split_once(" %"));
    let share: f64 = share.context(format!("a loss of speed in: {}", ran.all()))?.0.parse()?;
    assert!(share > 30.0, "{cost}");
    let line = "mitigations = [\"no-cuda-graphs\"]\n";
    assert!(ran.stdout.contains(line), "{}", ran.all());
    let before = std::fs::read_to_string(&bench.config)?;
    std::fs::write(&bench.config, before.replacen(PLAIN, &format!("{PLAIN}{line}"), 1))?;
    // With the cure configured, nothing leaks.
    let again = bench.run(&IMAGES[1..]).await?;
    assert_eq!(again.code, 0, "{}", again.all());
    Ok(())
}

#[tokio::test]
async fn what_nothing_cures_is_told_and_what_cannot_be_tried_with_its_reason() -> Outcome {
    let bench = Bench::new(json!({"leak_kib_per_request": 1024}), PLAIN)?;
    let ran = bench.run(&TEXTS).await?;
    assert!(ran.stdout.contains("nothing that was tried stops the growth of host"), "{}", ran.all());
    assert_eq!(ran.code, LEAKS, "{}", ran.all());
    let why = |item: &str| {
        let start = format!("{item}: ");
        ran.stdout.lines().find_map(|line| line.strip_prefix(&start)).map(str::to_owned).unwrap_or_default()
    };
    assert!(
        why("graph-cache-cap").contains("needs a llama-server built with the patch set"),
        "{}",
        ran.all()
    );
    assert!(
        why("cache-ram").contains("`--cache-ram 0`") || why("cache-ram").contains("changes nothing"),
        "{}",
        ran.all()
    );
    assert!(why("build-no-cuda-graphs").contains("needs another build"), "{}", ran.all());
    assert!(why("preload-allocator").contains("needs a value"), "{}", ran.all());
    Ok(())
}

#[tokio::test]
async fn a_report_has_versions_figures_and_a_script_that_shows_the_growth_by_itself() -> Outcome {
    let bench = Bench::new(json!({"leak_kib_per_request": 1024}), PLAIN)?;
    let ran = bench.run(&["--workload", "short-text", "--requests", "80", "--report", "out"]).await?;
    let folder = bench.setup.home.path().join("out");
    let figures =
        || std::fs::read_to_string(folder.join("findings.json")).unwrap_or_else(|error| error.to_string());
    assert_eq!(ran.code, LEAKS, "{}\n{}", ran.all(), figures());
    let text = std::fs::read_to_string(folder.join("report.md"))?;
    for part in
        ["# Memory of llama-server grows", "0.0.0-fake", "host under short-text: +", "sh reproduce.sh"]
    {
        assert!(text.contains(part), "`{part}` in {text}");
    }
    let json: Value = serde_json::from_str(&std::fs::read_to_string(folder.join("findings.json"))?)?;
    assert_eq!(json["legs"][0]["series"][0]["verdict"], "leaking");
    // The script needs only the server, a shell and curl.
    let script = folder.join("reproduce.sh").display().to_string();
    let port = warden_rig::ports::free()?;
    let mut home = bench.setup;
    home.home.env.insert("PORT".into(), port.to_string().into());
    let path = std::env::var_os("PATH").context("PATH")?;
    home.home.env.insert("PATH".into(), path);
    let ran = home.home.run("sh".as_ref(), [script.as_str(), "45"], LONG).await?;
    assert_eq!(ran.code, 0, "{}", ran.all());
    let rate = ran.stdout.lines().find_map(|line| line.strip_prefix("host: ")?.split_once(" KiB a request"));
    let rate: i64 = rate.context(ran.all())?.0.parse()?;
    assert!((900..1400).contains(&rate), "{}", ran.all());
    Ok(())
}

/// A server that dies at its 22nd request with an image, unless this variable is set, as one did on a GPU.
fn dies(unless: &str) -> Value {
    let line = "CUDA error: an illegal instruction was encountered";
    json!({
        "stderr": [line],
        "faults": [{ "from": 22, "body_has": "image_url", "do": "crash", "unless": [unless] }],
    })
}

#[tokio::test]
async fn a_crash_is_cured_by_the_variable_that_stops_it_and_everything_about_it_is_told() -> Outcome {
    let bench = Bench::new(dies("GGML_CUDA_DISABLE_GRAPHS"), PLAIN)?;
    let folder = bench.setup.home.path().join("report");
    let folder_text = folder.display().to_string();
    let args =
        ["--bisect", "--workload", "image-sizes,short-text", "--requests", "70", "--report", &folder_text];
    let (report, ran) = bench.report(&args).await?;
    assert_eq!(ran.code, CRASHES, "{}", ran.all());
    let crash = &report["legs"][0]["crash"];
    assert_eq!((&crash["at_request"], &crash["again"]), (&json!(22), &json!("always")), "{crash}");
    assert_eq!(report["legs"][1]["workload"], "short-text", "the other work is done");
    assert_eq!(report["legs"][1]["crash"], Value::Null);
    let found = &report["survival"][0];
    assert_eq!(found["conclusion"]["outcome"]["kind"], "cured", "{found}");
    assert_eq!(found["mitigations"], json!(["no-cuda-graphs"]), "{found}");
    assert!(found["conclusion"]["doubt"].as_f64().is_some_and(|doubt| doubt <= 0.01), "{found}");
    let others = found["conclusion"]["trials"].as_array().cloned().unwrap_or_default();
    let others = others.iter().filter(|trial| trial["switches"] != found["conclusion"]["cure"]);
    assert!(others.clone().all(|trial| trial["does"] == "nothing" || trial["failed"].is_string()), "{found}");
    let read = |name: &str| std::fs::read_to_string(folder.join(name));
    for part in [
        "# A crash of llama-server",
        "at request 22, every time (5 of 5",
        "`no-cuda-graphs` stops the crash",
        "CUDA error",
    ] {
        assert!(read("report.md")?.contains(part), "{part}: {}", read("report.md")?);
    }
    let script = read("reproduce.sh")?;
    assert!(
        script.contains("# Shows how llama-server crashes") && script.contains("at request 22"),
        "{script}"
    );
    assert!(folder.join("requests/21.json").is_file(), "all that led to it");
    Ok(())
}

#[tokio::test]
async fn a_crash_that_nothing_stops_is_told_as_such() -> Outcome {
    let bench = Bench::new(dies("NO_SUCH_VARIABLE"), PLAIN)?;
    let ran = bench.run(&["--bisect", "--workload", "same-image", "--requests", "40"]).await?;
    assert_eq!(ran.code, CRASHES, "{}", ran.all());
    assert!(
        ran.stdout.contains("crash: nothing that was tried stops the crash under same-image"),
        "{}",
        ran.all()
    );
    assert!(ran.stdout.contains("no-cuda-graphs") && !ran.stdout.contains("mitigations ="), "{}", ran.all());
    Ok(())
}
