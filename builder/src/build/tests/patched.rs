//! Builds with patch sets, with an invented source, set and compiler.

use std::path::Path;

use warden_patches::{PatchStatus, PlannedSet, SelectedSets, SetCatalogue, SetRefusal};

use super::*;

/// The version of the source's only function that the set knows.
const ENGINE: &str = "// an engine\nstatic int turn(int wheel) {\n    wheel += 1;\n    return wheel;\n}\n";

/// A set with one fix, which leaves `marker` in the binary. Its seam knows only [`ENGINE`].
fn set(folder: &Path, marker: &str) {
    let folder = folder.join("brake");
    fs::create_dir_all(&folder).unwrap();
    let text = format!(
        r#"
schema = 1
id = "brake"
title = "Stops the wheel"
[[sidecar]]
file = "brake.h"
beside = "include"
[[hook]]
id = "include"
files = ["src/engine.cpp"]
container = {{ kind = "function", name = "turn" }}
at = "before-container"
insert = ['#include "brake.h"']
[[hook]]
id = "stop"
files = ["src/engine.cpp"]
container = {{ kind = "function", name = "turn" }}
anchor = "return wheel;"
at = "before"
insert = ["brake::stop();"]
[[seam]]
id = "turn"
files = ["src/engine.cpp"]
container = {{ kind = "function", name = "turn" }}
[[fix]]
id = "wheel-brake"
title = "A brake"
symptom = "The wheel turns for ever"
marker = "{marker}"
[[fix.variable]]
name = "LLAMA_WARDEN_WHEEL_BRAKE"
type = "flag"
"#
    );
    fs::write(folder.join("set.toml"), text).unwrap();
    fs::write(folder.join("brake.h"), "namespace brake { inline void stop() {} } // BRAKE-MARK\n").unwrap();
    // The normalized text of the function above, from its name on: blanks collapsed, comments removed.
    let normal = "turn(int wheel) { wheel += 1; return wheel; }";
    let hash = &hex::encode(<sha2::Sha256 as sha2::Digest>::digest(normal))[..16];
    let known = serde_json::json!({
        "schema": 1,
        "normalisation": "comments stripped, white space collapsed",
        "seams": { "turn": [{ "hash": hash, "label": "v1", "commit": "0000000", "source": "ours", "statements": [] }] },
    });
    fs::write(folder.join("fingerprints.json"), known.to_string()).unwrap();
}

/// A ninja whose binary is the patched file with the sidecar: no server, but with the texts that a compiler
/// would keep.
const NINJA: &str = "mkdir bin; cat ../src/src/engine.cpp ../src/src/brake.h > bin/llama-server";

fn rig(engine: &str, marker: &str) -> Rig {
    let mut rig = Rig::new(&[("ninja", &ninja(NINJA))]);
    let root = rig.folder.path().to_owned();
    fs::create_dir_all(root.join("source/src")).unwrap();
    fs::write(root.join("source/src/engine.cpp"), engine).unwrap();
    set(&root.join("sets"), marker);
    rig.request.patches.catalogue = SetCatalogue::default().with_folder(&root.join("sets")).unwrap();
    rig
}

fn refusals(error: BuilderError) -> Vec<SetRefusal> {
    match error {
        BuilderError::Patches(warden_patches::PatchError::Refused(refusals)) => refusals,
        other => unreachable!("{other}"),
    }
}

#[tokio::test]
async fn a_patched_build_has_its_own_name_and_its_fix_in_the_binary() {
    let mut rig = rig(ENGINE, "BRAKE-MARK");
    let plan = rig.builder.plan(&rig.request).await.unwrap();
    let [PlannedSet { set, status: PatchStatus::Verified, seams, edits, allowed_unverified: false, .. }] =
        plan.patches.as_slice()
    else {
        unreachable!("{plan}");
    };
    assert_eq!((set.as_str(), seams[0].known.as_deref()), ("brake", Some("v1")));
    assert_eq!(plan.recipe.patch_set, format!("brake@{edits}"));
    assert_eq!(plan.fixes(), ["wheel-brake"]);
    // The marker was found, so the first failure is the start of the binary, which is no server.
    let error = rig.builder.build(&rig.request).await.unwrap_err();
    assert!(matches!(error, BuilderError::Verify { .. }), "{error}");
    let source = rig.folder.path().join("source/src/engine.cpp");
    assert_eq!(fs::read_to_string(source).unwrap(), ENGINE, "the user's own source is never written to");
    rig.nothing_is_left();

    rig.request.patches.sets = SelectedSets::None;
    let unpatched = rig.builder.plan(&rig.request).await.unwrap();
    assert_eq!((unpatched.recipe.patch_set.as_str(), unpatched.fixes().len()), ("none", 0));
    assert_ne!(unpatched.id, plan.id);
}

#[tokio::test]
async fn the_edits_stand_in_the_work_folder_when_cmake_is_called() {
    let mut rig = rig(ENGINE, "BRAKE-MARK");
    let seen = rig.folder.path().join("seen.cpp");
    let script = format!(
        "[ \"$1\" = --version ] && echo cmake version 4.0.0 && exit; cp src/src/engine.cpp {}; exit 1",
        seen.display()
    );
    let cmake = rig.folder.path().join("bin/cmake");
    fs::write(&cmake, format!("#!/bin/sh\n{script}\n")).unwrap();
    rig.builder.build(&rig.request).await.unwrap_err();
    let patched = fs::read_to_string(&seen).unwrap();
    assert!(
        patched.contains("    brake::stop(); // llama-warden:brake/stop\n    return wheel;\n"),
        "{patched}"
    );
    rig.request.patches.sets = SelectedSets::None;
    rig.builder.build(&rig.request).await.unwrap_err();
    assert_eq!(fs::read_to_string(&seen).unwrap(), ENGINE);
}

#[tokio::test]
async fn a_fix_that_is_not_in_the_binary_is_an_error_that_names_it() {
    let rig = rig(ENGINE, "ANOTHER-MARK");
    let error = rig.builder.build(&rig.request).await.unwrap_err();
    assert!(matches!(&error, BuilderError::Markers { fixes } if fixes == &["wheel-brake"]), "{error}");
    rig.nothing_is_left();
}

#[tokio::test]
async fn a_hook_whose_lines_are_not_compiled_is_an_error_that_names_it() {
    let mut rig = rig(ENGINE, "BRAKE-MARK");
    let path = rig.folder.path().join("sets/brake/set.toml");
    let text = fs::read_to_string(&path).unwrap();
    let marked = text.replace(
        "insert = [\"brake::stop();\"]",
        "insert = ['brake::stop(\"brake hook\");']\nmarker = \"brake hook\"",
    );
    assert_ne!(text, marked);
    fs::write(&path, marked).unwrap();
    let folder = rig.folder.path().join("sets");
    rig.request.patches.catalogue = SetCatalogue::default().with_folder(&folder).unwrap();
    let error = rig.builder.build(&rig.request).await.unwrap_err();
    assert!(matches!(error, BuilderError::Verify { .. }), "its mark is in the binary: {error}");
    // Simulates a linker that drops the unused function.
    let ninja_without = NINJA.replace("cat ", "sed 's/brake hook//' ");
    let ninja = rig.folder.path().join("bin/ninja");
    let script = fs::read_to_string(&ninja).unwrap();
    assert!(script.contains(NINJA));
    fs::write(&ninja, script.replace(NINJA, &ninja_without)).unwrap();
    let error = rig.builder.build(&rig.request).await.unwrap_err();
    assert!(
        matches!(&error, BuilderError::Markers { fixes } if fixes == &["hook `stop` of brake"]),
        "{error}"
    );
}

#[tokio::test]
async fn code_that_nobody_has_looked_at_is_refused_until_it_is_allowed_and_that_is_recorded() {
    let mut rig = rig(&ENGINE.replace("+= 1", "+= 2"), "BRAKE-MARK");
    let found = refusals(rig.builder.plan(&rig.request).await.unwrap_err());
    assert_eq!((found[0].set.as_str(), found[0].unverified), ("brake", true));
    assert!(found[0].reasons.iter().any(|reason| reason.contains("src/engine.cpp")), "{found:?}");
    rig.request.patches.allow_unverified = true;
    let plan = rig.builder.plan(&rig.request).await.unwrap();
    assert!(plan.patches[0].allowed_unverified && plan.patches[0].status == PatchStatus::Unverified);
    assert_eq!(plan.patches[0].seams[0].known, None);
    assert_eq!(plan.fixes(), ["wheel-brake"]);
}

#[tokio::test]
async fn a_source_that_the_hooks_do_not_fit_is_refused_before_anything_is_written() {
    let mut rig = rig(&ENGINE.replace("return wheel", "return wheel * 2"), "BRAKE-MARK");
    rig.request.patches.allow_unverified = true;
    let error = rig.builder.build(&rig.request).await.unwrap_err();
    assert_eq!(error.kind(), crate::ErrorClass::Refused);
    assert!(!refusals(error)[0].unverified, "allowing it does not help");
    assert!(!rig.folder.path().join("cache").exists());
}

#[tokio::test]
async fn a_set_for_another_backend_is_left_out_unless_it_is_asked_for() {
    let mut rig = rig(ENGINE, "BRAKE-MARK");
    let path = rig.folder.path().join("sets/brake/set.toml");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(&path, text.replace("title = \"Stops the wheel\"", "title = \"x\"\nbackends = [\"cuda\"]"))
        .unwrap();
    rig.request.patches.catalogue =
        SetCatalogue::default().with_folder(&rig.folder.path().join("sets")).unwrap();
    assert_eq!(rig.builder.plan(&rig.request).await.unwrap().recipe.patch_set, "none");
    rig.request.patches.sets = SelectedSets::Only(vec!["brake".into()]);
    let found = refusals(rig.builder.plan(&rig.request).await.unwrap_err());
    assert_eq!(found[0].reasons, ["it is for cuda, and the build for cpu"]);
    rig.request.patches.sets = SelectedSets::Only(vec!["break".into()]);
    let error = rig.builder.plan(&rig.request).await.unwrap_err();
    assert!(error.to_string().contains("`break`"), "{error}");
}

#[tokio::test]
async fn a_source_that_changed_after_it_was_planned_is_not_patched() {
    let rig = rig(ENGINE, "BRAKE-MARK");
    let plan = rig.builder.plan(&rig.request).await.unwrap();
    let engine = rig.folder.path().join("source/src/engine.cpp");
    for changed in [format!("// more\n{ENGINE}"), ENGINE.replace("+= 1", "+= 2")] {
        fs::write(&engine, &changed).unwrap();
        let root = rig.folder.path().join("source");
        let error = planning::apply_sets(&rig.request.patches, &plan, &root).unwrap_err();
        assert!(matches!(error, BuilderError::SourceChanged { .. } | BuilderError::Patches(_)), "{error}");
        assert_eq!(fs::read_to_string(&engine).unwrap(), changed);
    }
}

#[tokio::test]
async fn an_archive_is_unpacked_for_the_patches_once_and_then_remembered() {
    let mut rig = rig(ENGINE, "BRAKE-MARK");
    let archive = rig.folder.path().join("source.tar.gz");
    let mut tar = tar::Builder::new(flate2::write::GzEncoder::new(
        fs::File::create(&archive).unwrap(),
        flate2::Compression::fast(),
    ));
    tar.append_dir_all("llama.cpp", rig.folder.path().join("source")).unwrap();
    tar.into_inner().unwrap().finish().unwrap();
    rig.request.source = BuildSource::at(&archive).unwrap();
    let first = rig.builder.plan(&rig.request).await.unwrap();
    let files = rig.folder.path().join("cache/sources/files");
    let folder = fs::read_dir(&files).unwrap().next().unwrap().unwrap().path();
    let remembered: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(!remembered.is_empty());
    assert_eq!(rig.builder.plan(&rig.request).await.unwrap(), first);
    // The cache is used: the judged engine is not the one in the archive.
    let other = ENGINE.replace("+= 1", "+= 2");
    for file in &remembered {
        if fs::read_to_string(file).unwrap().contains("wheel") {
            fs::write(file, format!("+{other}")).unwrap();
        }
    }
    assert!(refusals(rig.builder.plan(&rig.request).await.unwrap_err())[0].unverified);
    // A wrong cache cannot affect a build.
    rig.request.patches.allow_unverified = true;
    let error = rig.builder.build(&rig.request).await.unwrap_err();
    assert!(matches!(error, BuilderError::SourceChanged { .. }), "{error}");
}
