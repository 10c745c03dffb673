//! Stores with valid builds, damaged ones and foreign entries.

use super::lineage::check_successor;
use super::*;
use crate::plan::ComputeBackend;
use crate::plan::tests::plan;
use crate::toolchain::{BuildDrivers, BuildTool};
use crate::verify::VerifyResults;

/// Provenance of a build that does not exist.
pub(crate) fn provenance(options: &[&str], built_at: &str, size: u64) -> Provenance {
    let plan = plan(options).unwrap();
    let tool = BuildTool { path: "/usr/bin/true".into(), version: "1".into() };
    Provenance {
        schema: PROVENANCE_SCHEMA,
        id: plan.id.clone(),
        built_at: built_at.into(),
        plan,
        drivers: BuildDrivers { cmake: tool.clone(), ninja: tool, launcher: None },
        timings: BuildTimings::default(),
        binary: BinaryFacts { size, sha256: String::new() },
        libraries: std::collections::BTreeMap::new(),
        verified: VerifyResults::default(),
        host: BuildHost::current(),
        fixes: Vec::new(),
    }
}

/// A store with builds of these times, oldest first.
fn store(folder: &Path, times: &[&str]) -> (BuildStore, Vec<BuildId>) {
    let store = BuildStore::new(folder);
    let binary = folder.join("binary");
    fs::write(&binary, "12345").unwrap();
    let ids = times.iter().map(|time| {
        let provenance = provenance(&[&format!("TIME={time}")], time, 5);
        store.install(&binary, &provenance).unwrap();
        provenance.id
    });
    let ids = ids.collect();
    (store, ids)
}

/// Runs the garbage collection, and returns the removed builds.
fn gone(store: &BuildStore, keep: &GcKeep) -> Vec<BuildId> {
    let sweep = store.plan_gc(keep).unwrap();
    store.gc(&sweep, |_, _| ()).unwrap();
    sweep.builds.into_iter().map(|(id, _)| id).collect()
}

#[test]
fn what_a_build_that_was_cut_short_left_is_swept_and_what_others_put_there_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let (store, _) = store(folder.path(), &["2026-01-01T00:00:00Z"]);
    let names = [".incoming-aaaaaaaaaaaaaaaa", ".incoming-bbbbbbbbbbbbbbbb", ".incoming-mail"];
    let [ours, theirs, mail] = names.map(|name| store.root().join(name));
    for path in [&ours, &theirs, &mail] {
        fs::create_dir(path).unwrap();
        fs::write(path.join(BINARY_FILE), "half").unwrap();
    }
    fs::write(theirs.join("keep"), "mine").unwrap();
    let keep = GcKeep { newest: 1, ids: Vec::new() };
    assert_eq!(store.plan_gc(&keep).unwrap().leftovers, [(ours.clone(), 4)]);
    assert!(gone(&store, &keep).is_empty());
    assert!(!ours.exists() && theirs.join("keep").exists() && mail.exists());
}

#[test]
fn a_folder_with_other_things_is_not_removed_and_neither_is_a_link() {
    let folder = tempfile::tempdir().unwrap();
    let (store, ids) = store(folder.path(), &["2026-01-01T00:00:00Z"]);
    fs::write(store.folder(&ids[0]).join("notes.txt"), "mine").unwrap();
    let error = store.remove(&ids[0]).unwrap_err().to_string();
    assert!(error.contains("`notes.txt` is in it"), "{error}");
    assert!(store.binary(&ids[0]).is_ok(), "nothing of it was removed");
    let link: BuildId = "ffffffffffffffff".parse().unwrap();
    std::os::unix::fs::symlink(store.folder(&ids[0]), store.folder(&link)).unwrap();
    assert!(store.remove(&link).unwrap_err().to_string().contains("no folder"));
    fs::remove_file(store.folder(&ids[0]).join("notes.txt")).unwrap();
    store.remove(&ids[0]).unwrap();
}

#[test]
fn the_newest_build_is_in_use_until_one_is_chosen_and_then_that_one() {
    let folder = tempfile::tempdir().unwrap();
    let times = ["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z", "2026-01-03T00:00:00Z"];
    let (store, ids) = store(folder.path(), &times);
    let in_use = || store.default_build().unwrap().map(|build| build.id).unwrap();
    assert_eq!(in_use(), ids[2]);
    assert!(store.roll_back(&ids[2], Some("no")).unwrap_err().to_string().contains("no build to go back to"));
    store.choose(&ids[0], "by hand").unwrap();
    assert_eq!((in_use(), store.kept_by_choice()), (ids[0].clone(), vec![ids[0].clone()]));
    store.choose(&ids[2], "it is better").unwrap();
    store.choose(&ids[2], "twice is once").unwrap();
    assert_eq!((in_use(), store.kept_by_choice()), (ids[2].clone(), vec![ids[2].clone(), ids[0].clone()]));
    // The file of decisions is neither foreign nor a build.
    assert!(store.list().unwrap().foreign.is_empty());
    // A rollback from a build that is not the default any more changes nothing.
    assert_eq!(store.roll_back(&ids[1], None).unwrap(), ids[2]);
    assert_eq!((in_use(), store.choices().unwrap().rejected.len()), (ids[2].clone(), 0));
    assert_eq!(store.roll_back(&ids[2], Some("it leaks")).unwrap(), ids[0]);
    assert_eq!(in_use(), ids[0]);
    assert_eq!(store.choices().unwrap().rejected(&ids[2]).unwrap().why, "it leaks");
    assert!(store.roll_back(&ids[0], Some("again")).is_err(), "there is nothing before it");
    // Choosing a rejected build removes the rejection.
    store.choose(&ids[2], "by hand").unwrap();
    assert!(store.choices().unwrap().rejected(&ids[2]).is_none());
    store.remove(&ids[2]).unwrap();
    assert_eq!(in_use(), ids[0], "one that is gone serves nobody");
    assert!(store.choose(&ids[2], "gone").is_err());
}

/// Installs a build of this repository into the store.
fn install_of(store: &BuildStore, repository: &str, number: u32, built_at: &str) -> BuildId {
    let mut provenance = provenance(&[&format!("OF={repository}"), &format!("NUMBER={number}")], built_at, 5);
    let source = &mut provenance.plan.source;
    (source.kind, source.given) = ("git".into(), repository.into());
    source.revision.build_number = Some(number);
    let binary = store.root().parent().unwrap().join("binary");
    fs::write(&binary, "12345").unwrap();
    store.install(&binary, &provenance).unwrap();
    provenance.id
}

#[test]
fn a_build_of_a_fork_or_an_older_one_comes_into_use_by_a_choice_alone() {
    let folder = tempfile::tempdir().unwrap();
    let store = BuildStore::new(folder.path());
    fs::create_dir_all(store.root()).unwrap();
    let in_use = || store.default_build().unwrap().map(|build| build.id).unwrap();
    let (upstream, fork) =
        ("https://github.com/ggml-org/llama.cpp", "https://github.com/ikawrakow/ik_llama.cpp");
    install_of(&store, upstream, 100, "2026-01-01T00:00:00Z");
    let newer = install_of(&store, upstream, 200, "2026-01-02T00:00:00Z");
    assert_eq!(in_use(), newer, "the next of its line takes its place");
    let forked = install_of(&store, fork, 900, "2026-01-03T00:00:00Z");
    let older = install_of(&store, upstream, 150, "2026-01-04T00:00:00Z");
    assert_eq!(in_use(), newer);
    let why = |id| store.successor_obstacle(id).unwrap().map(|why| why.to_string()).unwrap_or_default();
    assert!(why(&forked).contains("ikawrakow/ik_llama.cpp") && why(&older).contains("older: b150"));
    assert_eq!(why(&newer), "");
    // Only the default build, not its successor, has a GPU.
    let gpu = Provenance {
        plan: crate::plan::tests::with_gpu(ComputeBackend::Cuda, &["90"], "/nvcc", "nvcc 13"),
        ..provenance(&[], "", 5)
    };
    assert_eq!(check_successor(&gpu.plan, &provenance(&[], "", 5).plan), Err(SuccessorObstacle::NoGpu));
    assert_eq!(check_successor(&provenance(&[], "", 5).plan, &gpu.plan), Ok(()));
    assert!(store.kept_by_choice().contains(&newer), "nobody removes it by age");

    // A successor becomes the default automatically, because there was no explicit choice.
    let newest = install_of(&store, upstream, 300, "2026-01-05T00:00:00Z");
    assert_eq!(in_use(), newest);
    store.choose(&forked, "by hand").unwrap();
    assert_eq!(in_use(), forked);
    install_of(&store, fork, 901, "2026-01-06T00:00:00Z");
    assert_eq!(in_use(), forked, "what was chosen stays");
    assert_eq!(store.roll_back(&forked, None).unwrap(), newest);
    // After an explicit choice, the build is not held any more.
    store.choose(&newest, "by hand").unwrap();
    install_of(&store, upstream, 400, "2026-01-07T00:00:00Z");
    assert_eq!(in_use(), newest);
}

#[test]
fn a_build_that_is_rejected_is_in_use_for_nobody_who_has_another() {
    let folder = tempfile::tempdir().unwrap();
    let (store, ids) = store(folder.path(), &["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"]);
    let in_use = || store.default_build().unwrap().map(|build| build.id).unwrap();
    store.reject(&ids[1], "it leaks").unwrap();
    assert_eq!(in_use(), ids[0], "the newest was found worse");
    // Chosen, rolled back without a rejection, and chosen again: no rollback to itself.
    for build in [&ids[0], &ids[1], &ids[0]] {
        store.choose(build, "x").unwrap();
    }
    assert_eq!(store.roll_back(&ids[0], None).unwrap(), ids[1]);
    assert!(store.choices().unwrap().rejected(&ids[0]).is_none());
    store.reject(&ids[1], "after all").unwrap();
    assert!(store.kept_by_choice().is_empty());
    store.remove(&ids[0]).unwrap();
    assert_eq!(in_use(), ids[1], "better than none");
}

#[test]
fn who_was_killed_over_a_move_leaves_word_and_another_choice_ends_it() {
    let folder = tempfile::tempdir().unwrap();
    let (store, ids) = store(folder.path(), &["2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"]);
    let moving = || store.pending_move().map(|moving| (moving.build, moving.back));
    store.choose(&ids[0], "by hand").unwrap();
    assert_eq!(moving(), None);
    store.begin_rollout(&ids[1], "it is new").unwrap();
    assert_eq!(moving(), Some((ids[1].clone(), false)));
    assert!(store.list().unwrap().foreign.is_empty());
    store.finish_move().unwrap();
    store.finish_move().unwrap();
    assert_eq!(moving(), None);
    store.roll_back(&ids[1], None).unwrap();
    assert_eq!(moving(), Some((ids[1].clone(), true)));
    store.choose(&ids[1], "by hand").unwrap();
    assert_eq!(moving(), None);
    // The file of the move exists, and the choice was not written.
    fs::write(store.root().join(MOVE_FILE), format!("{{\"build\":\"{}\",\"back\":false}}", ids[0])).unwrap();
    assert_eq!(moving(), None);
    fs::write(store.root().join(MOVE_FILE), "{}").unwrap();
    assert_eq!(moving(), None);
}

#[test]
fn choices_that_nobody_understands_keep_no_server_down_and_are_not_written_over() {
    let folder = tempfile::tempdir().unwrap();
    let (store, ids) = store(folder.path(), &["2026-01-01T00:00:00Z"]);
    fs::write(store.root().join(CHOICES_FILE), "{\"schema\": 9}").unwrap();
    assert_eq!(store.default_build().unwrap().map(|build| build.id), Some(ids[0].clone()));
    for error in [store.choose(&ids[0], "x").unwrap_err(), store.reject(&ids[0], "x").unwrap_err()] {
        assert!(error.to_string().contains("cannot be understood"), "{error}");
    }
    assert_eq!(fs::read_to_string(store.root().join(CHOICES_FILE)).unwrap(), "{\"schema\": 9}");
}

#[test]
#[expect(clippy::disallowed_methods, reason = "tests stop where the system has no thread to give")]
fn removing_waits_for_whoever_writes() {
    let folder = tempfile::tempdir().unwrap();
    let (store, ids) = store(folder.path(), &["2026-01-01T00:00:00Z"]);
    let held = store.lock().unwrap();
    let (done, is_done) = std::sync::mpsc::channel();
    let (other, id) = (store.clone(), ids[0].clone());
    let thread = std::thread::spawn(move || {
        other.remove(&id).unwrap();
        done.send(()).unwrap();
    });
    // The other call must wait, because we hold the lock.
    assert!(is_done.try_recv().is_err() && store.folder(&ids[0]).exists());
    drop(held);
    thread.join().unwrap();
    assert!(!store.folder(&ids[0]).exists());
}

#[test]
fn the_build_of_a_binary_is_known_by_its_path() {
    let folder = tempfile::tempdir().unwrap();
    let (store, ids) = store(folder.path(), &["2026-01-01T00:00:00Z"]);
    assert_eq!(store.find_by_file(&store.folder(&ids[0]).join(BINARY_FILE)), Some(ids[0].clone()));
    assert_eq!(store.find_by_file(Path::new("/usr/bin/llama-server")), None);
    let link = folder.path().join("link");
    std::os::unix::fs::symlink(store.root(), &link).unwrap();
    assert_eq!(store.find_by_file(&link.join(ids[0].as_str()).join(BINARY_FILE)), Some(ids[0].clone()));
}

#[test]
fn an_installed_build_is_listed_shown_and_found() {
    let folder = tempfile::tempdir().unwrap();
    let (store, ids) = store(folder.path(), &["2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"]);
    let listed: Vec<BuildId> = store.list().unwrap().builds.into_iter().map(|build| build.id).collect();
    assert_eq!(listed, [ids[1].clone(), ids[0].clone()]);
    assert_eq!(store.newest().unwrap().unwrap().id, ids[1]);
    assert_eq!(fs::read(store.binary(&ids[0]).unwrap()).unwrap(), b"12345");
    assert_eq!(
        fs::read_dir(store.root()).unwrap().count(),
        3,
        "two builds and the lock: nothing half-made is left"
    );
}

#[test]
fn a_store_that_does_not_exist_is_empty() {
    let store = BuildStore::new(Path::new("/nonexistent"));
    assert!(store.list().unwrap().builds.is_empty());
    assert!(store.newest().unwrap().is_none());
    assert!(matches!(store.resolve("00"), Err(BuilderError::NoSuchBuild { .. })));
}

#[test]
fn a_prefix_finds_one_build_or_tells_the_candidates() {
    let folder = tempfile::tempdir().unwrap();
    let store = BuildStore::new(folder.path());
    for name in ["aa00000000000000", "aa00000000000001", "bb00000000000000"] {
        fs::create_dir_all(store.root().join(name)).unwrap();
    }
    assert_eq!(store.resolve("BB").unwrap().as_str(), "bb00000000000000");
    let message = store.resolve("aa").unwrap_err().to_string();
    assert_eq!(message, "`aa` is the beginning of 2 builds: aa00000000000000, aa00000000000001");
    assert!(matches!(store.resolve(""), Err(BuilderError::NoSuchBuild { .. })));
}

#[test]
fn damaged_and_foreign_folders_are_reported_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let (store, ids) = store(folder.path(), &["2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z"]);
    fs::write(store.folder(&ids[0]).join(BINARY_FILE), "cut").unwrap();
    fs::create_dir(store.root().join("cc00000000000000")).unwrap();
    fs::create_dir(store.root().join("my notes")).unwrap();
    let listing = store.list().unwrap();
    assert_eq!(listing.builds.len(), 1);
    assert_eq!(listing.foreign, [store.root().join("my notes")]);
    let whys: Vec<&str> = listing.damaged.iter().map(|(_, why)| why.as_str()).collect();
    assert!(whys.iter().any(|why| why.contains("has not the size")), "{whys:?}");
    assert!(whys.iter().any(|why| why.contains("provenance.json cannot be read")), "{whys:?}");
    assert!(matches!(store.binary(&ids[0]), Err(BuilderError::DamagedBuild { .. })));
    assert_eq!(gone(&store, &GcKeep::default()), [ids[1].clone()]);
    assert!(store.root().join("my notes").exists() && store.folder(&ids[0]).exists());
    store.remove(&ids[0]).unwrap();
    assert!(!store.folder(&ids[0]).exists());
}

#[test]
fn the_provenance_of_another_build_does_not_pass() {
    let folder = tempfile::tempdir().unwrap();
    let (store, ids) = store(folder.path(), &["2026-01-01T00:00:00Z"]);
    let other: BuildId = "dd00000000000000".parse().unwrap();
    fs::rename(store.folder(&ids[0]), store.folder(&other)).unwrap();
    assert!(store.show(&other).unwrap_err().to_string().contains(ids[0].as_str()));
}

#[test]
fn gc_keeps_the_newest_and_the_named() {
    let folder = tempfile::tempdir().unwrap();
    let times =
        ["2026-01-01T00:00:00Z", "2026-02-01T00:00:00Z", "2026-03-01T00:00:00Z", "2026-04-01T00:00:00Z"];
    let (store, ids) = store(folder.path(), &times);
    let keep = GcKeep { newest: 1, ids: vec![ids[0].clone()] };
    let sweep = store.plan_gc(&keep).unwrap();
    assert_eq!(sweep.left, 2);
    assert!(sweep.bytes() > 2 * 5, "the provenance counts, too");
    assert_eq!(gone(&store, &keep), [ids[2].clone(), ids[1].clone()]);
    let left: Vec<BuildId> = store.list().unwrap().builds.into_iter().map(|build| build.id).collect();
    assert_eq!(left, [ids[3].clone(), ids[0].clone()]);
}

#[test]
fn installing_replaces_a_damaged_build_of_the_same_name() {
    let folder = tempfile::tempdir().unwrap();
    let (store, ids) = store(folder.path(), &["2026-01-01T00:00:00Z"]);
    fs::write(store.folder(&ids[0]).join(PROVENANCE_FILE), "{").unwrap();
    assert!(store.show(&ids[0]).is_err());
    store
        .install(&folder.path().join("binary"), &provenance(&["TIME=2026-01-01T00:00:00Z"], "x", 5))
        .unwrap();
    store.show(&ids[0]).unwrap();
}

#[test]
fn a_provenance_says_what_a_configuration_asks_of_a_build() {
    let mut provenance =
        provenance(&["GGML_CUDA_GRAPHS:BOOL=ON", "GGML_CUDA_GRAPHS=OFF", "X=a=b"], "2026-01-01T00:00:00Z", 5);
    provenance.fixes.push("pool-purge".into());
    assert_eq!(provenance.fixes(), ["pool-purge"]);
    assert_eq!(provenance.backend().name(), "cpu");
    assert_eq!(provenance.option("GGML_CUDA_GRAPHS"), Some("OFF"), "the last one wins, as in cmake");
    assert_eq!((provenance.option("X"), provenance.option("GGML_CUDA")), (Some("a=b"), None));
}

#[test]
fn a_provenance_from_before_there_were_patches_is_read() {
    let mut json = serde_json::to_value(provenance(&[], "2026-01-01T00:00:00Z", 5)).unwrap();
    assert!(json.as_object_mut().unwrap().remove("fixes").is_some());
    for absent in ["toolkit", "why", "patches"] {
        assert!(json["plan"].get(absent).is_none(), "{absent} is left out of plain builds");
    }
    assert!(json["verified"].as_object_mut().unwrap().remove("devices").is_some());
    let read: Provenance = serde_json::from_value(json).unwrap();
    assert_eq!(read, provenance(&[], "2026-01-01T00:00:00Z", 5));
}

#[test]
fn removing_what_is_not_there_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let id = "ee00000000000000".parse().unwrap();
    assert!(matches!(BuildStore::new(folder.path()).remove(&id), Err(BuilderError::NoSuchBuild { .. })));
}

#[test]
fn only_sixteen_small_hexadecimal_digits_are_an_id() {
    assert!("0123456789abcdef".parse::<BuildId>().is_ok());
    for bad in ["0123456789abcde", "0123456789ABCDEF", "../../etc/passwd", "0123456789abcdefa"] {
        assert!(bad.parse::<BuildId>().unwrap_err().to_string().contains(bad));
    }
}
