//! Patch sets of a user, from their folder to the process of a model; and `patches prove`, whose record
//! counts only for the code that it was made with.

use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;
use warden_builder::prove::{BuildPair, PART_TIMEOUT, compare_builds};
use warden_builder::{BuildEnvironment, Builder, BuilderDirs, EventReporter};
use warden_patches::SetCatalogue;
use warden_patches::prove::StepResult;
use warden_rig::home::Ran;
use warden_rig::real::{llama_server, llama_server_plain};
use warden_rig::sdists::ERAS;
use warden_rig::warden::{SOON, Setup};
use warden_rig::{Context as _, Home, Outcome, Trouble, binaries};

/// Limit for compiling and running a small program on a busy machine.
const LONG: Duration = Duration::from_secs(300);
/// Limit for nine scenarios in three variants with the structs of a real tree.
const VERY_LONG: Duration = Duration::from_secs(1200);

const SET: &str = r#"schema = 1
id = "mine"
title = "Counts turns"

[[sidecar]]
file = "mine.h"
beside = "end"

[[hook]]
id = "end"
files = ["src/wheel.cpp"]
container = { kind = "function", name = "turn" }
anchor = "return total;"
at = "before"
insert = ["mine::count(total);"]

[[seam]]
id = "turn"
files = ["src/wheel.cpp"]
container = { kind = "function", name = "turn" }

[conformance]
title = "as a program of its own"
before = "show/before.h"
program = "show/program.cpp"

[[conformance.part]]
files = ["src/wheel.cpp"]
container = { kind = "function", name = "turn" }

[[conformance.scenario]]
id = "sum"
text = "the wheel turns as often as it is told"

[[conformance.scenario]]
id = "counts"
text = "turns are counted once the variable is set"
env = { MINE_LIMIT = "3" }

[[conformance.scenario]]
id = "elsewhere"
text = "something that no tree has"

[[fix]]
id = "count-turns"
title = "Counts turns"
symptom = "nobody knows how often the wheel turned"
memory = ["host"]
marker = "mine: counting turns"

[[fix.life]]
is = "needed"
by = "source"
text = "nobody counts"

[[fix.variable]]
name = "MINE_LIMIT"
type = "integer"
default = 16
min = 1
max = 1000
unit = "turns"
"#;

const SIDECAR: &str = "#pragma once\n#include <cstdlib>\nnamespace mine {\ninline int & counted() { static int all = 0; return all; }\n\
                       inline void count(int) { if (std::getenv(\"MINE_LIMIT\")) { counted() += 1; } }\n}\n";

/// Program that calls the tree's function through the sidecar.
const PROGRAM: &str = "#include <cstring>\nint main(int, char ** words) {\n\
    \x20   if (std::strcmp(words[1], \"elsewhere\") == 0) { return 77; }\n\
    \x20   const int total = turn(4);\n    mine::count(total);\n\
    \x20   if (std::strcmp(words[1], \"counts\") == 0) { return mine::counted() == 1 ? 0 : 1; }\n\
    \x20   return total == 6 ? 0 : 1;\n}\n";

const WHEEL: &str = "int turn(int n) {\n    int total = 0;\n    for (int i = 0; i < n; i++) {\n        total += i;\n    }\n    return total;\n}\n";

/// A home with an invented llama.cpp in `tree`, and a configured set in `sets`.
fn home() -> Result<Home, Trouble> {
    let home = Home::new()?;
    for name in ["CMakeLists.txt", "ggml/CMakeLists.txt", "tools/server/CMakeLists.txt"] {
        home.file(&format!("tree/{name}"), "# nothing\n")?;
    }
    home.file("tree/src/wheel.cpp", WHEEL)?;
    home.file("sets/mine/set.toml", SET)?;
    home.file("sets/mine/mine.h", SIDECAR)?;
    home.file("sets/mine/show/before.h", "#pragma once\n")?;
    home.file("sets/mine/show/program.cpp", PROGRAM)?;
    home.file("sets/mine/fingerprints.json", r#"{"schema":1,"seams":{}}"#)?;
    home.file("conf/w.toml", "[paths]\npatches = [\"../sets\"]\n")?;
    Ok(home)
}

async fn ran(home: &Home, args: &[&str], code: i32) -> Result<Ran, Trouble> {
    let all = [args, &["--config", "conf/w.toml"]].concat();
    let ran = home.warden(&all, LONG).await?;
    if ran.code != code || ran.all().contains("panicked") {
        return Err(Trouble::new(format!("{all:?}: code {} instead of {code}: {ran:?}", ran.code)));
    }
    Ok(ran)
}

async fn status(home: &Home, code: i32) -> Result<String, Trouble> {
    let ran =
        ran(home, &["patches", "check", "--source", "tree", "--patch-set", "mine", "--json"], code).await?;
    let rows: Value = serde_json::from_str(&ran.stdout).context(&ran.stdout)?;
    Ok(rows[0]["status"].as_str().unwrap_or_default().to_owned())
}

const PROVE: [&str; 5] = ["patches", "prove", "mine", "--source", "tree"];
const APPLY: [&str; 6] = ["patches", "apply", "--source", "tree", "--patch-set", "mine"];

#[tokio::test]
async fn what_was_shown_counts_for_just_that_code_and_that_set() -> Outcome {
    let home = home()?;
    let record = home.path().join("conf/verified.toml");
    assert_eq!(status(&home, 3).await?, "unverified");
    assert!(ran(&home, &APPLY, 3).await?.stderr.contains("llama-warden patches prove"));
    // A plan shows new code and does nothing.
    let plan = ran(&home, &[&PROVE[..], &["--plan"]].concat(), 0).await?;
    assert!(plan.stdout.contains("of 1 seams 1 nobody has looked at (turn)"), "{plan:?}");
    assert!(!record.exists());
    // The tree has no server, so only the program can prove the set.
    let shown = ran(&home, &[&PROVE[..], &["--no-servers"]].concat(), 0).await?;
    for line in [
        "shown      sum: ",
        "shown      counts: ",
        "not here   elsewhere: ",
        "not shown  servers",
        "recorded in ",
    ] {
        assert!(shown.stdout.contains(line), "{line}: {shown:?}");
    }
    let text = std::fs::read_to_string(&record)?;
    assert!(text.contains("set = \"mine\"") && text.contains("[verified.seams]\nturn = \""), "{text}");
    assert_eq!(status(&home, 0).await?, "locally-verified");
    ran(&home, &APPLY, 0).await?;
    home.file("tree/src/wheel.cpp", WHEEL)?;
    std::fs::remove_file(home.path().join("tree/src/mine.h"))?;
    // A proven set is proven again only on request.
    let again = ran(&home, &PROVE, 0).await?;
    assert!(again.stderr.contains("mine is locally-verified in tree already"), "{again:?}");

    // With other code the record does not count; with the old code it counts again.
    home.file("tree/src/wheel.cpp", WHEEL.replace("int total = 0;", "int total = 0; n += 0;"))?;
    assert_eq!(status(&home, 3).await?, "unverified");
    home.file("tree/src/wheel.cpp", WHEEL)?;
    assert_eq!(status(&home, 0).await?, "locally-verified");
    // A changed set needs a new proof.
    home.file("sets/mine/mine.h", SIDECAR.replace("+= 1", "+= 2"))?;
    assert_eq!(status(&home, 3).await?, "unverified");
    home.file("sets/mine/mine.h", SIDECAR)?;
    // The record does not count for another configuration.
    home.file("other/w.toml", "[paths]\npatches = [\"../sets\"]\n")?;
    let args = ["patches", "check", "--source", "tree", "--patch-set", "mine", "--config", "other/w.toml"];
    assert_eq!(home.warden(args, SOON).await?.code, 3);
    // An unreadable record is reported and kept.
    std::fs::write(&record, "half a rec")?;
    for args in [&APPLY[..], &PROVE] {
        let told = ran(&home, args, 2).await?;
        assert!(told.stderr.contains("verified.toml") && told.stderr.contains("hint: "), "{told:?}");
    }
    assert_eq!(std::fs::read_to_string(&record)?, "half a rec");
    Ok(())
}

#[tokio::test]
async fn what_does_not_behave_does_not_fit_or_cannot_be_shown_is_not_recorded() -> Outcome {
    let home = home()?;
    let record = home.path().join("conf/verified.toml");
    let prove = [&PROVE[..], &["--no-servers"]].concat();
    // The loop turns once too often, but the hook still fits.
    home.file("tree/src/wheel.cpp", WHEEL.replace("i < n", "i <= n"))?;
    let told = ran(&home, &prove, 3).await?;
    assert!(
        told.stdout.contains("FAILED     sum: ") && told.stderr.contains("nothing was recorded"),
        "{told:?}"
    );
    // The code does not compile with the sidecar.
    home.file("tree/src/wheel.cpp", WHEEL.replace("total += i;", "total += wheel_size;"))?;
    let told = ran(&home, &prove, 3).await?;
    assert!(told.stdout.contains("FAILED     compiles") && told.stdout.contains("wheel_size"), "{told:?}");
    // The hook has two places.
    home.file(
        "tree/src/wheel.cpp",
        WHEEL.replace("int total = 0;", "int total = 0; if (n < 0) { return total; }"),
    )?;
    let told = ran(&home, &prove, 3).await?;
    assert!(told.stderr.contains("does not fit") && told.stderr.contains("hook `end`"), "{told:?}");
    // A set without a program, in a tree without a server.
    home.file("tree/src/wheel.cpp", WHEEL)?;
    let cut = SET.find("[conformance]").context("a program")?..SET.find("[[fix]]").context("a fix")?;
    home.file("sets/mine/set.toml", [&SET[..cut.start], &SET[cut.end..]].concat())?;
    let told = ran(&home, &prove, 3).await?;
    assert!(told.stderr.contains("could not be shown on this machine"), "{told:?}");
    ran(&home, &["patches", "prove", "nothing", "--source", "tree"], 2).await?;
    assert!(!record.exists());
    Ok(())
}

#[tokio::test]
async fn the_cuda_part_is_played_with_the_structs_of_a_real_tree_that_nobody_has_looked_at() -> Outcome {
    let era = ERAS.iter().find(|era| era.version == "0.3.22").context("an era")?;
    let tree = era.tree().await?;
    let common = tree.path().join("ggml/src/ggml-cuda/common.cuh");
    let text = std::fs::read_to_string(&common)?;
    // A further member, as forks have them.
    let member = "struct ggml_backend_cuda_context {\n    int device;";
    assert!(text.contains(member));
    std::fs::write(&common, text.replace(member, &format!("{member}\n    int of_a_fork = 0;")))?;
    let home = Home::new()?;
    home.file("w.toml", "")?;
    let source = tree.path().to_string_lossy().into_owned();
    let args = [
        "patches",
        "prove",
        "cuda-memory",
        "--no-servers",
        "--json",
        "--config",
        "w.toml",
        "--tree",
        &source,
    ];
    let ran = home.warden(args, VERY_LONG).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    let told: Value = serde_json::from_str(&ran.stdout).context(&ran.stdout)?;
    let steps = told["sets"][0]["proof"]["steps"].as_array().context("steps")?;
    let shown = steps.iter().filter(|step| step["how"] == "shown").count();
    // Three compilations and nine scenarios, all of which concern this tree.
    assert_eq!(shown, 12, "{steps:#?}");
    let check = ["patches", "check", "--config", "w.toml", "--patch-set", "cuda-memory", "--source", &source];
    let ran = home.warden(check, SOON).await?;
    assert!(ran.code == 0 && ran.stdout.contains("locally verified"), "{ran:?}");
    Ok(())
}

/// Writes a fake llama-server with the provenance of a `build` with the set into a store.
fn put_build(home: &Home, id: &str) -> Outcome {
    let folder = home.path().join("data/llama-warden/builds").join(id);
    std::fs::create_dir_all(&folder)?;
    let binary = folder.join("llama-server");
    std::fs::copy(binaries::fake_llama()?, &binary)?;
    let tool = json!({"path": "/usr/bin/true", "version": "1"});
    let fix = json!({
        "id": "count-turns", "title": "Counts turns", "symptom": "nobody knows", "memory": ["host"], "marker": "mine: counting turns",
        "variable": [{"name": "MINE_LIMIT", "type": "integer", "default": 16, "min": 1.0, "max": 1000.0, "unit": "turns"}],
    });
    let provenance = json!({
        "schema": 1, "id": id, "built_at": "2026-01-01T00:00:00Z",
        "plan": {
            "id": id,
            "recipe": {"schema": 1, "source": "x", "root": "", "patch_set": "mine@0", "backend": "cpu", "arch": "native",
                "cmake": [], "c": "c", "cxx": "c", "target": "t", "cpu": "c"},
            "source": {"given": "/src", "kind": "folder", "identity": "x", "root": "", "server": "tools/server",
                "revision": {"commit": null, "build_number": null}},
            "compilers": {"c": tool, "cxx": tool, "target": "t", "cpu": "c"},
            "patches": [{"set": "mine", "status": "verified", "edits": "012345678901", "own": [fix],
                "fixes": [{"fix": "count-turns", "status": "verified", "marker": "mine: counting turns"}]}],
        },
        "drivers": {"cmake": tool, "ninja": tool, "launcher": null},
        "timings": {"unpack": 0.0, "configure": 0.0, "compile": 0.0, "verify": 0.0},
        "binary": {"size": std::fs::metadata(&binary)?.len(), "sha256": ""},
        "verified": {"checks": []}, "fixes": ["count-turns"],
        "host": {"name": "", "kernel": "", "machine": "", "cpu": ""},
    });
    std::fs::write(folder.join("provenance.json"), provenance.to_string())?;
    Ok(())
}

#[tokio::test]
async fn a_fix_of_ones_own_is_switched_on_for_a_model_with_or_without_its_folder() -> Outcome {
    let id = "aaaaaaaaaaaaaaaa";
    let setup = Setup::new()?;
    put_build(&setup.home, id)?;
    let setup = setup.fake("a", &json!({}), "mitigations = [\"count-turns=32\"]\n")?;
    let config = setup.config();
    let line = config.lines().find(|line| line.starts_with("binary")).context("the line of the binary")?;
    let config = config.replace(line, &format!("build = \"{id}\""));
    let file = setup.home.file("w.toml", &config)?;
    let check = |file: &Path| ["config".into(), "check".into(), file.as_os_str().to_owned()];
    // The set's folder is missing, but the build's provenance suffices.
    let ran = setup.home.warden(check(&file), SOON).await?;
    assert_eq!(ran.code, 0, "{ran:?}");
    let wrong = setup.home.file("wrong.toml", config.replace("count-turns=32", "count-turn=32"))?;
    let ran = setup.home.warden(check(&wrong), SOON).await?;
    assert!(ran.code == 2 && ran.stderr.contains("the nearest is `count-turns`"), "{ran:?}");
    let wrong = setup.home.file("wrong.toml", config.replace("count-turns=32", "count-turns=0"))?;
    let ran = setup.home.warden(check(&wrong), SOON).await?;
    assert!(ran.code == 2 && ran.stderr.contains("from 1 to 1000 (turns)"), "{ran:?}");
    // Another server lacks the fix. The folder makes the fix known, and the error says what is missing.
    setup.home.file("sets/mine/set.toml", SET)?;
    for (name, text) in [("mine.h", SIDECAR), ("show/before.h", ""), ("show/program.cpp", PROGRAM)] {
        setup.home.file(&format!("sets/mine/{name}"), text)?;
    }
    setup.home.file("sets/mine/fingerprints.json", r#"{"schema":1,"seams":{}}"#)?;
    let plain = format!("paths.patches = [\"sets\"]\n{}", setup.config());
    let plain = setup.home.file("plain.toml", plain)?;
    let ran = setup.home.warden(check(&plain), SOON).await?;
    assert!(
        ran.code == 2 && ran.stderr.contains("needs a llama-server built with the patch set mine"),
        "{ran:?}"
    );
    let shown =
        setup.home.warden(["mitigations", "show", "count-turns", "--config", "plain.toml"], SOON).await?;
    assert!(
        shown.code == 0 && shown.stdout.contains("a set of your own: build aaaaaaaaaaaaaaaa"),
        "{shown:?}"
    );
    // A user's fix with the name of an embedded one is refused.
    setup.home.file("sets/mine/set.toml", SET.replace("id = \"count-turns\"", "id = \"graph-cache-cap\""))?;
    let ran = setup.home.warden(check(&plain), SOON).await?;
    assert!(
        ran.code == 2 && ran.stderr.contains("the fix `graph-cache-cap` is taken by the set `cuda-memory`"),
        "{ran:?}"
    );

    let serve = ["serve".into(), "--config".into(), file.into_os_string()];
    let warden = setup.start_with(&serve).await?;
    let backend = warden.until_ready(1).await?[0];
    assert_eq!(backend.variable("MINE_LIMIT").as_deref(), Some("32".as_ref()));
    let status = warden.cli(&["status"]).await?;
    assert!(status.stdout.contains("mitigations: count-turns=32 (your set mine)"), "{}", status.all());
    Ok(())
}

#[tokio::test]
async fn a_plain_and_a_patched_server_are_held_against_each_other_fix_by_fix() -> Outcome {
    let (patched, plain) = (llama_server().await?, llama_server_plain().await?);
    let cache = tempfile::tempdir()?;
    let builder = Builder {
        dirs: BuilderDirs { cache: cache.path().to_owned(), data: cache.path().to_owned() },
        env: BuildEnvironment::from_process(),
        memory: || None,
        reporter: EventReporter::silent(),
        cancel: CancellationToken::new(),
    };
    let catalogue = SetCatalogue::embedded()?;
    let fixes: Vec<_> = catalogue.require("server")?.fixes.iter().collect();
    let pair = BuildPair {
        plain: &plain,
        patched: &patched,
        fixes,
        gpu: false,
        sanitizer: None,
        limit: LONG,
        patience: PART_TIMEOUT,
    };
    let steps = compare_builds(&builder, &pair).await?;
    assert!(steps.len() == 4 && steps.iter().all(|step| step.how == StepResult::Shown), "{steps:#?}");
    assert!(steps[2].text.contains("llama-server's part gave back"), "{steps:#?}");
    // A server without the fixes answers alike, but does not log that they are on.
    let patience = Duration::from_secs(2);
    let steps = compare_builds(&builder, &BuildPair { patched: &plain, patience, ..pair }).await?;
    assert_eq!(steps[0].how, StepResult::Shown, "{steps:#?}");
    assert!(steps[1].how == StepResult::Failed && steps[1].text.contains("it does not say"), "{steps:#?}");
    assert!(
        steps[2].how == StepResult::Failed && steps[2].text.contains("0 of 1 parts accept requests"),
        "{steps:#?}"
    );
    Ok(())
}
