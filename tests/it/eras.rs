//! Promise: the patch sets fit real llama.cpp sources of eighteen months, can be applied and reversed byte
//! for byte, and refuse incompatible changes of upstream with a reason for maintainers. The sources are those
//! of `warden_rig::sdists`.

mod changes;
mod placed;
mod plan;

use std::collections::BTreeMap;
use std::future::Future;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use serde_json::Value;
use tokio::task::JoinSet;
use warden_patches::SetCatalogue;
use warden_rig::home::Ran;
use warden_rig::sdists::{ERAS, Era};
use warden_rig::{Context as _, Home, Outcome, Trouble};

/// Limit for one command on a busy machine; the longest reads an archive of 70 MB.
const SOON: Duration = Duration::from_secs(240);

/// Each path below a folder: mode, and content of a file or target of a link.
type Snapshot = BTreeMap<String, (u32, Vec<u8>)>;

fn snapshot(root: &Path) -> Result<Snapshot, Trouble> {
    let mut found = Snapshot::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder)? {
            let path = entry?.path();
            let facts = std::fs::symlink_metadata(&path)?;
            let content = if facts.is_symlink() {
                std::fs::read_link(&path)?.into_os_string().into_encoded_bytes()
            } else if facts.is_dir() {
                folders.push(path.clone());
                Vec::new()
            } else {
                std::fs::read(&path)?
            };
            let name = path.strip_prefix(root)?.to_str().context("a name that is text")?.to_owned();
            found.insert(name, (facts.mode(), content));
        }
    }
    Ok(found)
}

/// Returns the paths that differ; contents would be millions of characters.
fn differing<'a>(one: &'a Snapshot, other: &'a Snapshot) -> Vec<&'a str> {
    let of = |these: &'a Snapshot, those: &'a Snapshot| {
        these.iter().filter(|(name, found)| those.get(*name) != Some(found)).map(|(name, _)| name.as_str())
    };
    let mut names: Vec<&str> = of(one, other).chain(of(other, one)).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Writes what differs from the snapshot.
fn restore(root: &Path, snapshot_before: &Snapshot) -> Outcome {
    for name in differing(snapshot_before, &snapshot(root)?) {
        match snapshot_before.get(name) {
            Some((_, content)) => std::fs::write(root.join(name), content)?,
            None => std::fs::remove_file(root.join(name))?,
        }
    }
    Ok(())
}

/// Runs `patches` with this exit code; an error must name the next step.
async fn patches(home: &Home, args: &[&str], code: i32) -> Result<Ran, Trouble> {
    let ran = home.warden([&["patches"], args].concat(), SOON).await?;
    let helps = code == 0 || (ran.stderr.contains("error: ") && ran.stderr.contains("hint: "));
    if ran.code != code || !helps || ran.all().contains("panicked") {
        return Err(Trouble::new(format!("{args:?}: code {} instead of {code}: {ran:?}", ran.code)));
    }
    Ok(ran)
}

async fn json(home: &Home, args: &[&str], code: i32) -> Result<Value, Trouble> {
    let ran = patches(home, &[args, &["--json"]].concat(), code).await?;
    serde_json::from_str(&ran.stdout).context(ran.stdout)
}

/// Rows of a check: patch, status, reason.
fn rows(value: &Value) -> Vec<(String, String, String)> {
    let text = |row: &Value, key: &str| row[key].as_str().unwrap_or("no text").to_owned();
    let all = value.as_array().map(Vec::as_slice).unwrap_or_default();
    all.iter().map(|row| (text(row, "patch"), text(row, "status"), text(row, "reason"))).collect()
}

fn text(path: &Path) -> Result<&str, Trouble> {
    path.to_str().context("a path that is text")
}

/// Runs the work for each era, in parallel on all cores.
async fn with_each<T>(work: impl Fn(Era) -> T) -> Outcome
where
    T: Future<Output = Outcome> + Send + 'static,
{
    let mut all = JoinSet::new();
    for era in ERAS {
        let work = work(era);
        all.spawn(async move { work.await.context(format!("llama-cpp-python {}", era.version)) });
    }
    while let Some(done) = all.join_next().await {
        done??;
    }
    Ok(())
}

/// Build number; the largest number for the newest era, whose number is unknown.
fn build(era: Era) -> u32 {
    era.build.unwrap_or(u32::MAX)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_fix_is_verified_in_every_era_that_has_its_defect() -> Outcome {
    with_each(|era| async move {
        let (home, archive) = (Home::new()?, era.archive().await?);
        let ran = patches(&home, &["check", "--source", text(&archive)?, "--json"], 0).await?;
        assert_eq!(ran.stderr, "", "nothing beside the answer");
        let value: Value = serde_json::from_str(&ran.stdout)?;
        let mut expected = Vec::new();
        for set in SetCatalogue::embedded()?.sets() {
            for fix in &set.fixes {
                let first = match fix.id.as_str() {
                    "graph-cache-cap" => 7821,
                    "slot-checkpoints" => 6723,
                    _ => 0,
                };
                let status = if build(era) < first { "not-applicable" } else { "verified" };
                expected.push((format!("{}/{}", set.id, fix.id), status));
            }
        }
        let found = rows(&value);
        let short: Vec<(String, &str)> =
            found.iter().map(|(patch, status, _)| (patch.clone(), status.as_str())).collect();
        assert_eq!(short, expected);
        for (row, (_, status, reason)) in value.as_array().into_iter().flatten().zip(&found) {
            let keys: Vec<&String> = row.as_object().context("an object")?.keys().collect();
            assert_eq!(keys, ["revision", "patch", "status", "reason"]);
            assert_eq!(row["revision"], value[0]["revision"]);
            assert!(row["revision"].as_str().is_some_and(|name| !name.is_empty()), "{row}");
            if status == "verified" {
                // If a source already does what a fix does, the fix fits but is not needed.
                let needless = ["cuda-memory/pool-purge", "cuda-memory/cublas-reset"];
                let is_told =
                    needless.iter().any(|fix| row["patch"] == *fix) && reason.starts_with("superseded: ");
                assert!(reason.is_empty() || is_told, "{row}");
            } else {
                let words = if row["patch"] == "cuda-memory/graph-cache-cap" {
                    ["common.cuh:", "struct `ggml_backend_cuda_context`", "nothing to cap"]
                } else {
                    ["server.cpp", "struct `server_prompt`", "nothing to save"]
                };
                for word in words {
                    assert!(reason.contains(word), "{word}: {reason}");
                }
            }
        }
        Ok(())
    })
    .await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_every_era_what_goes_in_stands_in_its_place_once() -> Outcome {
    with_each(|era| async move {
        let (home, folder) = (Home::new()?, era.tree().await?);
        let tree = text(folder.path())?;
        let apply = ["apply", "--source", tree];
        let before = snapshot(folder.path())?;
        // Export a series for other build systems, from the unchanged tree.
        let exported = era.version == ERAS[0].version || era.version == ERAS[ERAS.len() - 1].version;
        if exported {
            export(&home, tree).await?;
        }

        let told = json(&home, &apply, 0).await?;
        assert_eq!(told["outcome"], "written");
        let patched = snapshot(folder.path())?;
        let catalogue = SetCatalogue::embedded()?;
        let mut changed = Vec::new();
        for set in catalogue.sets() {
            let defines = if set.id == "cuda-memory" { placed::cuda_defines(build(era)) } else { Vec::new() };
            changed.extend(placed::in_place(folder.path(), set, &defines).context(&set.id)?);
        }
        changed.sort();
        changed.dedup();
        assert_eq!(differing(&before, &patched), changed, "and nothing else");
        placed::no_other_marks(&patched, catalogue.sets())?;
        if exported {
            same_as_exported(&home, &patched).await?;
        }

        assert_eq!(json(&home, &apply, 3).await?["outcome"], "refused");
        assert_eq!(differing(&patched, &snapshot(folder.path())?), Vec::<&str>::new(), "never twice");
        restore(folder.path(), &before)?;
        assert_eq!(json(&home, &apply, 0).await?["outcome"], "written");
        assert_eq!(differing(&patched, &snapshot(folder.path())?), Vec::<&str>::new(), "as the first time");
        Ok(())
    })
    .await
}

/// Exports into `series`, and copies the tree to `plain`.
async fn export(home: &Home, tree: &str) -> Outcome {
    let told = json(home, &["export", "--source", tree, "-o", "series"], 0).await?;
    assert_eq!(told["patches"].as_array().map(Vec::len), Some(2), "{told}");
    let copy = home.run("cp".as_ref(), ["-a", tree, "plain"], SOON).await?;
    assert_eq!(copy.code, 0, "{copy:?}");
    Ok(())
}

/// git and `patches apply` must produce the same tree.
async fn same_as_exported(home: &Home, patched: &Snapshot) -> Outcome {
    let series =
        ["0001-cuda-memory.patch", "0002-server.patch"].map(|name| home.path().join("series").join(name));
    for patch in &series {
        let ran = home.run("git".as_ref(), ["-C", "plain", "apply", text(patch)?], SOON).await?;
        assert_eq!(ran.all(), "", "git finds nothing to say");
        assert_eq!(ran.code, 0);
    }
    let plain = snapshot(&home.path().join("plain"))?;
    assert_eq!(differing(&plain, patched), Vec::<&str>::new());
    Ok(())
}
