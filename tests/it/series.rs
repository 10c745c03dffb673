//! Promise: memory series survive restarts and kills, and damage to their files affects nothing else.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::{Value, json};
use warden_rig::warden::{CHAT, SOON, Setup, chat};
use warden_rig::{Context as _, Outcome, Trouble, Warden, wait_until};

/// The finest points cover a second and are written at once.
const FAST: &str = "sensors.interval = \"50ms\"\ninternal.series.first = \"1s\"\ninternal.series.flush = \"50ms\"\n\
                    internal.series.look = \"5ms\"\ninternal.series.retry = \"100ms\"\n";

const NAME: &str = "org/a b";

async fn series(warden: &Warden, query: &str) -> Result<Value, Trouble> {
    let answer = warden.admin().get(&format!("/series{query}")).await?;
    if !answer.status.is_success() {
        return Err(Trouble::new(format!("{}: {}", answer.status, answer.text())));
    }
    answer.json()
}

async fn of_model(warden: &Warden, range: &str) -> Result<Value, Trouble> {
    series(warden, &format!("?model=org%2Fa%20b&points=1000&range={range}")).await
}

/// Points of host memory: their start and number of readings.
async fn points(warden: &Warden, range: &str) -> Result<BTreeMap<u64, u64>, Trouble> {
    let data = of_model(warden, range).await?;
    let all = data["series"].as_array().context("no series")?;
    let host = all.iter().find(|one| one["memory"] == "host").map(|one| one["points"].clone());
    let points = host.and_then(|points| points.as_array().cloned()).unwrap_or_default();
    points
        .iter()
        .map(|point| Some((point["at"].as_u64()?, point["count"].as_u64()?)))
        .collect::<Option<_>>()
        .context(data)
}

async fn marks(warden: &Warden) -> Result<Vec<Value>, Trouble> {
    Ok(of_model(warden, "1h").await?["marks"].as_array().cloned().unwrap_or_default())
}

async fn until_points(warden: &Warden, count: usize) -> Outcome {
    wait_until("readings appear", SOON, async || {
        points(warden, "1h").await.is_ok_and(|points| points.len() >= count)
    })
    .await
}

fn folder(warden: &Warden) -> PathBuf {
    warden.home().path().join("state/llama-warden/series")
}

fn files(folder: &Path) -> Result<Vec<(String, u64)>, Trouble> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".series") {
            all.push((name, entry.metadata()?.len()));
        }
    }
    all.sort();
    Ok(all)
}

fn leaking() -> Value {
    json!({"leak_kib_per_request": 512})
}

#[tokio::test]
async fn readings_and_marks_are_there_at_once_and_survive_an_end_and_a_kill() -> Outcome {
    let warden = Setup::new()?.top(FAST).fake(NAME, &leaking(), "")?.start().await?;
    warden.until_ready(1).await?;
    for n in 0..30 {
        let answer = warden.http.post(CHAT, &chat(&format!("a-{n}"), NAME, "hi", 2, false)).await?;
        assert!(answer.status.is_success(), "{}", answer.text());
    }
    until_points(&warden, 3).await?;
    let data = of_model(&warden, "1h").await?;
    let host = &data["series"][0];
    let present = &host["present"];
    assert!(present["bytes"].as_u64().is_some_and(|bytes| bytes > 15 << 20), "{present}");
    assert!(present["means"].as_str().is_some_and(|text| text.ends_with('.')), "{present}");
    let last = host["points"].as_array().and_then(|points| points.last()).context("no points")?;
    let number = |name: &str| last[name].as_u64().unwrap_or_default();
    assert!(
        number("min") <= number("mean") && number("mean") <= number("max") && number("min") > 0,
        "{last}"
    );

    warden.restart(NAME, 1).await?;
    // An update becomes visible within a second.
    let asked = tokio::time::Instant::now();
    let found = loop {
        let late = asked.elapsed() >= Duration::from_secs(1);
        let found = marks(&warden).await?;
        if late || found.iter().any(|mark| mark["kind"] == "replaced") {
            break found;
        }
    };
    let mark = found.iter().find(|mark| mark["kind"] == "replaced").context(format!("{found:?}"))?;
    assert!(mark["words"].as_str().is_some_and(|words| words.contains("operator")), "{mark}");

    // A clean end loses no reading.
    let before = points(&warden, "1h").await?;
    let mut warden = warden;
    assert_eq!(warden.terminate(SOON).await?, 0);
    let mut warden = warden.again().await?;
    warden.until_ready(1).await?;
    until_points(&warden, before.len()).await?;
    let after = points(&warden, "1h").await?;
    let missing: Vec<_> =
        before.iter().filter(|(at, count)| after.get(at).is_none_or(|now| now < *count)).collect();
    assert!(missing.is_empty(), "{missing:?} of {before:?} in {after:?}");
    assert!(marks(&warden).await?.iter().any(|mark| mark["kind"] == "replaced"));

    // A kill loses at most the last two points, which were incomplete or unwritten.
    let (hour, month) = (points(&warden, "1h").await?, points(&warden, "30d").await?);
    warden.kid.signal(Signal::KILL);
    warden.kid.exit(SOON).await?;
    let warden = warden.again().await?;
    warden.until_ready(1).await?;
    until_points(&warden, 1).await?;
    let after = points(&warden, "1h").await?;
    let written = hour.len().saturating_sub(2);
    let missing: Vec<_> = hour
        .iter()
        .take(written)
        .filter(|(at, count)| after.get(at).is_none_or(|now| now < *count))
        .collect();
    assert!(missing.is_empty(), "{missing:?} of {hour:?} in {after:?}");
    // Wide points are rebuilt from fine ones.
    let sum = |points: &BTreeMap<u64, u64>| points.values().sum::<u64>();
    let (before, after) = (sum(&month), sum(&points(&warden, "30d").await?));
    let unwritten: u64 = hour.values().rev().take(2).sum();
    assert!(after + unwritten >= before, "{after} of {before}, {unwritten} were not complete");
    assert!(marks(&warden).await?.iter().any(|mark| mark["kind"] == "replaced"));

    // One file of constant length for each kind of memory.
    let all = files(&folder(&warden))?;
    assert!(all.len() == 1 && all[0].0.starts_with("m-org-a-b-0-host-"), "{all:?}");
    let listed = series(&warden, "").await?;
    assert_eq!(
        (&listed["series"][0]["model"], &listed["series"][0]["memory"]),
        (&json!(NAME), &json!("host"))
    );
    let length = all[0].1;
    let seen = points(&warden, "1h").await?.len();
    until_points(&warden, seen + 3).await?;
    assert_eq!(files(&folder(&warden))?[0].1, length);
    Ok(())
}

#[tokio::test]
async fn what_cannot_be_meant_is_told_and_an_unknown_model_is_404() -> Outcome {
    let warden = Setup::new()?.top(FAST).fake(NAME, &json!({}), "")?.start().await?;
    warden.until_ready(1).await?;
    for (query, status, told) in [
        ("?model=m&range=2h", 400, "1h, 6h, 1d, 7d, 30d"),
        ("?from=5", 400, "come together"),
        ("?model=%zz", 400, "%25"),
        ("?model=nobody", 404, "no series are kept of a model `nobody`"),
    ] {
        let answer = warden.admin().get(&format!("/series{query}")).await?;
        assert_eq!(answer.status.as_u16(), status, "{query}: {}", answer.text());
        assert!(answer.text().contains(told), "{query}: {}", answer.text());
    }
    Ok(())
}

#[tokio::test]
async fn a_second_instance_of_the_same_state_keeps_its_own_and_spoils_nothing() -> Outcome {
    let first = Setup::new()?.top(FAST).fake(NAME, &json!({}), "")?.start().await?;
    first.until_ready(1).await?;
    until_points(&first, 2).await?;
    let state = first.home().path().join("state/llama-warden");
    let top = format!("{FAST}paths.state_dir = '{}'", state.display());
    let mut second = Setup::new()?.top(&top).fake(NAME, &json!({}), "")?.start().await?;
    second.until_ready(1).await?;
    second.says("another llama-warden writes memory readings").await?;
    until_points(&second, 2).await?;
    let place = of_model(&second, "1h").await?["place"].clone();
    assert!(place.as_str().is_some_and(|place| place.contains("in this process only")), "{place}");
    // After the end of the first instance, the second continues its files.
    let kept = points(&first, "1h").await?;
    let mut first = first;
    assert_eq!(first.terminate(SOON).await?, 0);
    wait_until("the second one writes", SOON, async || {
        of_model(&second, "1h")
            .await
            .is_ok_and(|data| data["place"].as_str().is_some_and(|place| place.starts_with("in /")))
    })
    .await?;
    let now = points(&second, "1h").await?;
    let missing: Vec<_> =
        kept.iter().filter(|(at, count)| now.get(at).is_none_or(|now| now < *count)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    Ok(())
}

/// Starts llama-warden with a limit of file size, which acts like a full disk.
async fn cramped(setup: Setup, bytes: u64) -> Result<Warden, Trouble> {
    let config = setup.home.file("warden.toml", setup.config())?;
    let program = warden_rig::binaries::llama_warden()?;
    let args: Vec<OsString> = [
        "--ignore-signal=XFSZ".into(),
        "prlimit".into(),
        format!("--fsize={bytes}").into(),
        program.into_os_string(),
        "serve".into(),
        "--config".into(),
        config.into_os_string(),
    ]
    .into();
    setup.start_program(Path::new("/usr/bin/env"), &args).await
}

#[tokio::test]
async fn a_full_disk_costs_the_past_and_nothing_else() -> Outcome {
    let setup = Setup::new()?.top(FAST).fake(NAME, &json!({}), "")?;
    let mut warden = cramped(setup, 300_000).await?;
    warden.until_ready(1).await?;
    warden.says("memory readings cannot be written").await?;
    until_points(&warden, 4).await?;
    warden.restart(NAME, 1).await?;
    let answer = warden.http.post(CHAT, &chat("a", NAME, "hi", 2, false)).await?;
    assert!(answer.status.is_success(), "{}", answer.text());
    assert!(marks(&warden).await?.iter().any(|mark| mark["kind"] == "replaced"));
    assert_eq!(warden.kid.output().matches("memory readings cannot be written").count(), 1, "told once");
    assert_eq!(files(&folder(&warden))?, [], "nothing half-made stays");
    assert_eq!(warden.terminate(SOON).await?, 0);
    Ok(())
}

#[tokio::test]
async fn somebodys_file_in_the_place_of_the_folder_stays_and_is_named() -> Outcome {
    let setup = Setup::new()?.top(FAST).fake(NAME, &json!({}), "")?;
    let mine = setup.home.file("state/llama-warden/series", "mine")?;
    let mut warden = setup.start().await?;
    warden.until_ready(1).await?;
    warden.says("memory readings cannot be written").await?;
    until_points(&warden, 2).await?;
    assert_eq!(std::fs::read_to_string(&mine)?, "mine");
    // Writing continues as soon as possible.
    std::fs::remove_file(&mine)?;
    warden.says("are written from now on").await?;
    wait_until("there is a file", SOON, async || files(&folder(&warden)).is_ok_and(|all| all.len() == 1))
        .await
}
