//! `build --plan` reports the patch sets for a real source and a CUDA toolkit.

use std::path::Path;

use serde_json::Value;
use warden_rig::home::Ran;
use warden_rig::sdists::ERAS;
use warden_rig::{Context as _, Home, Outcome, Trouble};

use super::{SOON, text};

const NVCC: &str = "#!/bin/sh\necho 'nvcc: NVIDIA (R) Cuda compiler driver'\necho 'Cuda compilation tools, release 13.0, V13.0.88'\n";

/// A home whose PATH begins with a compiler that only prints its version.
fn home() -> Result<Home, Trouble> {
    let mut home = Home::new()?;
    let nvcc = home.program("toolkit/bin/nvcc", NVCC)?;
    let mut path = nvcc.parent().context("a folder")?.as_os_str().to_owned();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    home.env.insert("PATH".into(), path);
    Ok(home)
}

async fn plan(home: &Home, source: &Path, more: &[&str], code: i32) -> Result<Ran, Trouble> {
    let args = ["build", "--plan", "--backend", "cuda", "--arch", "90", "--source", text(source)?];
    let ran = home.warden([&args[..], more].concat(), SOON).await?;
    if ran.code == code {
        Ok(ran)
    } else {
        Err(Trouble::new(format!("{more:?}: code {code} expected: {ran:?}")))
    }
}

async fn json(home: &Home, source: &Path, more: &[&str]) -> Result<Value, Trouble> {
    let ran = plan(home, source, &[more, &["--json"]].concat(), 0).await?;
    serde_json::from_str(&ran.stdout).context(ran.stdout)
}

fn statuses(plan: &Value) -> Vec<String> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let told = |value: &Value, key: &str| {
        format!("{} {}", value[key].as_str().unwrap_or("?"), value["status"].as_str().unwrap_or("?"))
    };
    let mut all = Vec::new();
    for set in list(&plan["patches"]) {
        all.push(told(&set, "set"));
        all.extend(list(&set["fixes"]).iter().map(|fix| told(fix, "fix")));
    }
    all
}

/// Returns true for `cuda-memory@<12 digits>+server@<12 digits>`.
fn names_both_sets(plan: &Value) -> bool {
    let name = plan["recipe"]["patch_set"].as_str().unwrap_or_default();
    let is_hash = |text: &str| text.len() == 12 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let parts = name.split_once('+').and_then(|(cuda, server)| {
        Some((cuda.strip_prefix("cuda-memory@")?, server.strip_prefix("server@")?))
    });
    parts.is_some_and(|(cuda, server)| is_hash(cuda) && is_hash(server))
}

#[tokio::test]
async fn a_plan_for_cuda_has_the_sets_with_their_statuses_and_writes_nothing() -> Outcome {
    let home = home()?;
    for (era, later) in [(ERAS[0], "not-applicable"), (ERAS[ERAS.len() - 1], "verified")] {
        let plan = json(&home, &era.archive().await?, &[]).await?;
        let (cap, checkpoints) = (format!("graph-cache-cap {later}"), format!("slot-checkpoints {later}"));
        let expected = [
            "cuda-memory verified",
            &cap,
            "pool-purge verified",
            "cublas-reset verified",
            "memory-report verified",
            "reclaim-cuda verified",
            "server verified",
            "cancel-nonstream verified",
            "reclaim-heap verified",
            &checkpoints,
        ];
        assert_eq!(statuses(&plan), expected, "{}", era.version);
        assert!(names_both_sets(&plan), "{plan}");
        let marker = &plan["patches"][0]["fixes"][1]["marker"];
        assert_eq!(marker, "llama-warden: fix pool-purge active");
        let seams = plan["patches"][0]["seams"].as_array().context("seams")?;
        assert!(!seams.is_empty() && seams.iter().all(|seam| seam["known"].is_string()), "{plan}");
    }
    let builds = std::fs::read_dir(home.path().join("data"))?.count();
    assert_eq!(builds, 0, "nothing is built");
    Ok(())
}

#[tokio::test]
async fn an_unverified_tree_is_planned_when_allowed_and_marked() -> Outcome {
    let (home, tree) = (home()?, ERAS[ERAS.len() - 1].tree().await?);
    let sound = json(&home, tree.path(), &[]).await?;
    let file = tree.path().join("ggml/src/ggml-cuda/common.cuh");
    let common = std::fs::read_to_string(&file)?;
    let changed = common.replace("int curr_stream_no = 0;", "int curr_stream_no = 1;");
    assert_ne!(common, changed, "the invented change must be invented anew");
    std::fs::write(&file, changed)?;

    let ran = plan(&home, tree.path(), &["--json"], 3).await?;
    assert_eq!(ran.stdout, "");
    for word in [
        "the patch set `cuda-memory` is not verified",
        "common.cuh:",
        "curr_stream_no = 1",
        "--allow-unverified",
    ] {
        assert!(ran.stderr.contains(word), "{word}: {ran:?}");
    }
    let allowed = json(&home, tree.path(), &["--allow-unverified"]).await?;
    let told = statuses(&allowed);
    assert_eq!(told[..2], ["cuda-memory unverified", "graph-cache-cap unverified"]);
    assert_eq!(
        told[6..],
        [
            "server verified",
            "cancel-nonstream verified",
            "reclaim-heap verified",
            "slot-checkpoints verified"
        ]
    );
    let (cuda, server) = (&allowed["patches"][0], &allowed["patches"][1]);
    assert_eq!(cuda["allowed_unverified"], true);
    assert_eq!(server["allowed_unverified"], Value::Null);
    let reason = cuda["reasons"][0].as_str().context("a reason")?;
    assert!(reason.contains("seam `context`") && reason.contains("curr_stream_no = 1"), "{reason}");
    let unknown = cuda["seams"].as_array().into_iter().flatten().filter(|seam| seam["known"].is_null());
    assert_eq!(unknown.map(|seam| &seam["seam"]).collect::<Vec<_>>(), ["context"]);
    assert!(names_both_sets(&allowed), "{allowed}");
    assert_ne!(allowed["id"], sound["id"], "another source is another build");
    let shown = plan(&home, tree.path(), &["--allow-unverified"], 0).await?.stdout;
    assert!(shown.contains("  cuda-memory unverified, allowed\n"), "{shown}");
    let plain = json(&home, tree.path(), &["--plain"]).await?;
    assert_eq!((&plain["recipe"]["patch_set"], &plain["patches"]), (&"none".into(), &Value::Null));
    Ok(())
}
