//! A model's `mitigations` reach its process, and those that its llama-server lacks are reported before the
//! start.

use std::ffi::OsString;
use std::fmt::Write as _;

use serde_json::json;
use warden_rig::process::ProcessId;
use warden_rig::warden::{SOON, Setup};
use warden_rig::{Outcome, Trouble, Warden, binaries, wait_until};

/// Text that the fix leaves in a binary.
const MARKER: &str = "llama-warden: fix graph-cache-cap active";

const LIST: &str =
    "mitigations = [\"no-cuda-graphs\", \"cache-ram=64\", \"malloc-arenas=4\", \"no-concurrent-streams\"]\n";

fn variable(process: ProcessId, name: &str) -> Option<String> {
    process.variable(name).map(|value| value.to_string_lossy().into_owned())
}

fn only(warden: &Warden) -> Option<ProcessId> {
    match warden.backends().as_slice() {
        [one] => Some(*one),
        _ => None,
    }
}

#[tokio::test]
async fn the_process_gets_variables_and_flags_and_does_not_inherit_what_is_to_be_unset() -> Outcome {
    let mut setup = Setup::new()?;
    for (name, value) in [("GGML_CUDA_GRAPH_OPT", "1"), ("MALLOC_ARENA_MAX", "9"), ("UNTOUCHED", "1")] {
        setup.home.env.insert(OsString::from(name), OsString::from(value));
    }
    let plain = "[models.\"plain\"]";
    let setup = setup.fake("a", &json!({}), LIST)?.fake("plain", &json!({}), "")?;
    assert!(setup.config().contains(plain));
    let warden = setup.start().await?;
    let both = warden.until_ready(2).await?;
    let (with, without): (Vec<ProcessId>, Vec<ProcessId>) =
        both.into_iter().partition(|process| process.command_line().iter().any(|word| word == "--cache-ram"));
    let ([with], [without]) = (with.as_slice(), without.as_slice()) else {
        return Err(Trouble::new("one of the two has the flag"));
    };
    let line = with.command_line();
    let at = line.iter().position(|word| word == "--cache-ram").unwrap_or_default();
    assert_eq!(line.get(at + 1).map(String::as_str), Some("64"), "{line:?}");
    let seen = |process: ProcessId| {
        ["GGML_CUDA_DISABLE_GRAPHS", "MALLOC_ARENA_MAX", "GGML_CUDA_GRAPH_OPT", "UNTOUCHED"]
            .map(|name| variable(process, name).unwrap_or_default())
    };
    assert_eq!(seen(*with), ["1", "4", "", "1"]);
    assert_eq!(seen(*without), ["", "9", "1", "1"], "a model without the list has what we inherited");
    Ok(())
}

#[tokio::test]
async fn a_changed_list_replaces_the_process_at_a_reload() -> Outcome {
    let mut warden = Setup::new()?.fake("a", &json!({}), LIST)?.start().await?;
    let before = warden.until_ready(1).await?;
    warden.reload(&warden.setup.config().replace("malloc-arenas=4", "malloc-arenas=3"))?;
    wait_until("a process with the new value", SOON, async || {
        only(&warden).is_some_and(|one| variable(one, "MALLOC_ARENA_MAX").as_deref() == Some("3"))
    })
    .await?;
    assert_ne!(warden.backends(), before);
    // An invalid mitigation changes nothing.
    let after = warden.until_ready(1).await?;
    warden.reload(&warden.setup.config().replace("malloc-arenas=4", "malloc-arenas=0"))?;
    warden.says("is out of range: it is a whole number from 1 to 1024 (arenas)").await?;
    assert_eq!(warden.backends(), after);
    Ok(())
}

#[tokio::test]
async fn a_binary_without_the_fix_is_refused_and_one_with_it_gets_its_variables() -> Outcome {
    let setup = Setup::new()?;
    let copy = setup.home.program("llama-server", std::fs::read(binaries::fake_llama()?)?)?;
    let setup = setup.fake("a", &json!({}), "mitigations = [\"graph-cache-cap=8\"]\n")?;
    let config = setup.config().replace(&binaries::fake_llama()?.display().to_string(), "llama-server");
    let file = setup.home.file("w.toml", &config)?;
    let line = config.lines().position(|line| line.starts_with("mitigations")).unwrap_or_default() + 1;
    let check = [OsString::from("config"), "check".into(), file.clone().into()];
    let ran = setup.home.warden(&check, SOON).await?;
    assert_eq!(ran.code, 2, "{}", ran.all());
    let wanted = format!(
        "w.toml:{line}: model `a`: mitigation graph-cache-cap needs a llama-server built with the patch set cuda-memory"
    );
    assert!(ran.stderr.contains(&wanted) && ran.stderr.contains(MARKER), "{}", ran.stderr);
    assert!(ran.stderr.contains("hint: run `llama-warden build`"), "{}", ran.stderr);
    let serve = [OsString::from("serve"), "--config".into(), file.into()];
    let ran = setup.home.warden(&serve, SOON).await?;
    assert_eq!(ran.code, 2, "serve refuses, too: {}", ran.all());

    // Bytes after a program in its file are never run, but can be found.
    let mut content = std::fs::read(&copy)?;
    content.extend(MARKER.as_bytes());
    std::fs::write(&copy, content)?;
    let ran = setup.home.warden(&check, SOON).await?;
    assert_eq!((ran.code, ran.stdout.as_str()), (0, "ok: 1 model\n"), "{}", ran.all());
    let warden = setup.start_with(&serve).await?;
    let backends = warden.until_ready(1).await?;
    assert_eq!(variable(backends[0], "LLAMA_WARDEN_GRAPH_CACHE_CAP").as_deref(), Some("8"));
    assert!(
        variable(backends[0], "LLAMA_WARDEN_GRAPH_IDLE_TRIM_S").is_some(),
        "the fix has all its defaults"
    );
    Ok(())
}

/// A home whose llama-server has the flags of builds since about b10884 (`new`), or before (`old`).
fn of_time(time: &str, more: &str) -> Result<Setup, Trouble> {
    let mut setup = Setup::new()?;
    setup.home.env.insert(OsString::from("FAKE_LLAMA_HELP"), OsString::from(time));
    setup.fake("a", &json!({}), more)
}

#[tokio::test]
async fn a_flag_of_a_mitigation_is_written_as_the_binary_knows_it() -> Outcome {
    for (time, words) in [("new", ["--load-mode", "none"].as_slice()), ("old", ["--no-mmap"].as_slice())] {
        let setup = of_time(time, "mitigations = [\"no-mmap\"]\n")?;
        let file = setup.home.file("w.toml", setup.config())?;
        let ran = setup.home.warden([OsString::from("config"), "check".into(), file.into()], SOON).await?;
        assert_eq!((ran.code, ran.stdout.as_str()), (0, "ok: 1 model\n"), "{time}: {}", ran.all());
        let warden = setup.start().await?;
        let line = warden.until_ready(1).await?[0].command_line();
        assert!(line.windows(words.len()).any(|own| own == words), "{time}: {line:?}");
    }
    Ok(())
}

#[tokio::test]
async fn a_flag_that_has_another_name_in_this_build_is_told_with_that_name() -> Outcome {
    let more = "args = [\"-np\", \"2\", \"--no-mmap\"]\nfallback = [\"--mlock\"]\nmitigations = [\"no-op-offload\"]\n";
    let setup = of_time("new", more)?;
    let file = setup.home.file("w.toml", setup.config())?;
    let ran = setup.home.warden([OsString::from("config"), "check".into(), file.into()], SOON).await?;
    assert_eq!(ran.code, 2, "{}", ran.all());
    for wanted in [
        "has no flag `--no-mmap`\nhint: write `--load-mode none`; `--no-mmap` is gone since about b10884",
        "has no flag `--mlock`\nhint: write `--load-mode mlock`",
        "mitigation no-op-offload gives `--no-op-offload`, and ",
    ] {
        assert!(ran.stderr.contains(wanted), "{wanted}: {}", ran.stderr);
    }
    Ok(())
}

#[tokio::test]
async fn the_list_is_there_for_people_and_for_programs() -> Outcome {
    let setup = Setup::new()?;
    let text =
        setup.home.warden(["mitigations", "list", "--backend", "cuda", "--memory", "vram"], SOON).await?;
    assert_eq!(text.code, 0, "{}", text.all());
    assert!(
        text.stdout.contains("graph-cache-cap") && text.stdout.contains("cuda-graph-window"),
        "{}",
        text.stdout
    );
    assert!(!text.stdout.contains("build-no-hip-graphs"), "{}", text.stdout);
    let json = setup.home.warden(["mitigations", "list", "--json"], SOON).await?.stdout;
    let list: serde_json::Value = serde_json::from_str(&json)?;
    let mut shown = String::new();
    for entry in list["mitigations"].as_array().into_iter().chain(list["leaks"].as_array()).flatten() {
        let id = entry["id"].as_str().unwrap_or_default();
        let one = setup.home.warden(["mitigations", "show", id], SOON).await?;
        assert_eq!(one.code, 0, "{id}: {}", one.all());
        let _infallible = write!(shown, "{}", one.stdout);
    }
    assert!(shown.contains("GGML_CUDA_DISABLE_GRAPHS=1; it acts by being present"), "{shown}");
    let wrong = setup.home.warden(["mitigations", "show", "graph-cap"], SOON).await?;
    assert_eq!((wrong.code, wrong.stdout.as_str()), (2, ""));
    assert!(wrong.stderr.contains("the nearest is `graph-cache-cap`"), "{}", wrong.stderr);
    Ok(())
}
