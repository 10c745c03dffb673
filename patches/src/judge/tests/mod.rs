//! Invented code like upstream's, and possible changes to it.

mod anchors;
mod conditions;
mod fixes;
mod seams;

use std::collections::BTreeMap;
use std::fs;

use super::*;
use crate::edits::FileEdit;
use crate::judgement::{PatchStatus, SetJudgement};
use crate::scan::{CodeContainer, ContainerKind};
use crate::set::PatchSet;
use crate::set::SetCatalogue;
use crate::set::fingerprints::add_versions;
use crate::set::{CodePattern, ProbeConsequence};
use crate::tree::{SourceRevision, SourceTree};

const SET: &str = r#"schema = 1
id = "mine"
title = "Ours"

[[sidecar]]
file = "w.h"
beside = "include"

[[hook]]
id = "include"
files = ["gpu/new.cu", "gpu/old.cu"]
container = { kind = "function", name = "wheel_run" }
at = "before-container"
insert = ['#include "w.h"']

[[hook]]
id = "begin"
files = ["gpu/new.cu", "gpu/old.cu"]
container = { kind = "function", name = "wheel_run" }
anchor = "wheel * w ="
at = "after"
insert = ["ours::guard g(w);", "(void) g;"]

[[hook]]
id = "end"
files = ["gpu/new.cu", "gpu/old.cu"]
container = { kind = "function", name = "wheel_run" }
anchor = "return WHEEL_OK;"
at = "before"
insert = ["ours::turned(w);"]

[[probe]]
id = "one-return"
files = ["gpu/new.cu", "gpu/old.cu"]
container = { kind = "function", name = "wheel_run" }
pattern = '\breturn\b'
count = 1
why = "hook every return"

[[probe]]
id = "spokes"
files = ["gpu/wheel.h"]
container = { kind = "struct", name = "wheel" }
pattern = 'float\s+spokes\s*\[8\]'
why = "the sidecar counts eight spokes"

[[probe]]
id = "lock"
files = ["gpu/new.cu", "gpu/old.cu"]
pattern = '\bwheel_lock\b'
why = "-"
on_fail = "ignore"
define = "W_HAS_LOCK"

[[probe]]
id = "brakes"
files = ["gpu/wheel.h"]
pattern = '\bbrakes\b'
why = "a wheel without brakes does not squeal"
on_fail = "not-applicable"
fix = "oil-brakes"

[[seam]]
id = "run"
files = ["gpu/new.cu", "gpu/old.cu"]
container = { kind = "function", name = "wheel_run" }

[[seam]]
id = "wheel"
files = ["gpu/wheel.h"]
container = { kind = "struct", name = "wheel" }

[[seam]]
id = "lever"
files = ["gpu/wheel.h"]
container = { kind = "struct", name = "lever" }
optional = true

[[fix]]
id = "count-turns"
title = "Counts turns"
symptom = "nobody knows"

[[fix]]
id = "oil-brakes"
title = "Oils brakes"
symptom = "they squeal"
"#;

const RUN: &str = r#"// the wheel
#include "wheel.h"

static std::mutex wheel_lock;

static bool wheel_ready(wheel * w);

static status wheel_run(back * b, road * r) {
    wheel * w = (wheel *) b->inner;

    for (int i = 0; i < r->n; ++i) {
        w->turn(i); // return WHEEL_OK;
    }

    return WHEEL_OK;
}

static void wheel_free(back * b) {
    log("return WHEEL_OK;");
    delete b;
}
"#;

const WHEEL: &str =
    "struct wheel;\n\nstruct wheel {\n    float spokes[8];\n    int brakes;\n\n    void turn(int n);\n};\n";

struct Files(BTreeMap<String, Vec<u8>>);

impl SourceTree for Files {
    fn read(&self, path: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.0.get(path).cloned())
    }

    fn revision(&self) -> SourceRevision {
        SourceRevision::default()
    }
}

fn tree(run: &str, wheel: &str) -> Files {
    let files = [("gpu/new.cu", run), ("gpu/wheel.h", wheel)];
    Files(files.into_iter().map(|(path, text)| (path.to_owned(), text.as_bytes().to_vec())).collect())
}

fn unlearned() -> PatchSet {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("mine");
    fs::create_dir(&path).unwrap();
    fs::write(path.join("set.toml"), SET).unwrap();
    fs::write(path.join("w.h"), "#pragma once\n").unwrap();
    fs::write(path.join("fingerprints.json"), r#"{"schema":1}"#).unwrap();
    SetCatalogue::default().with_folder(&path).unwrap().set("mine").unwrap().clone()
}

/// The set, which knows the tree above.
fn set() -> PatchSet {
    let mut set = unlearned();
    let seen = fingerprint(&set, &tree(RUN, WHEEL)).unwrap();
    set.fingerprints = add_versions(&set.fingerprints, &seen, "b1", "abc", "wheels");
    set
}

fn judged(run: &str, wheel: &str) -> SetJudgement {
    judge(&set(), &tree(run, wheel)).unwrap()
}

fn edit<'a>(judgement: &'a SetJudgement, path: &str) -> &'a FileEdit {
    judgement.edits.as_ref().unwrap().0.iter().find(|edit| edit.path == path).unwrap()
}

fn text(edit: &FileEdit) -> String {
    String::from_utf8(edit.after.clone()).unwrap()
}

fn reasons(judgement: &SetJudgement) -> Vec<String> {
    let all: Vec<String> = judgement.reasons.iter().map(ToString::to_string).collect();
    assert!(all.iter().all(|reason| !reason.contains('\n')), "{all:?}");
    all
}

/// Expects a refusal without edits, for a reason that contains all of these parts.
fn refused(judgement: &SetJudgement, parts: &[&str]) {
    let all = reasons(judgement);
    assert_eq!((judgement.status, judgement.edits.is_none()), (PatchStatus::Refused, true), "{all:#?}");
    assert!(all.iter().any(|reason| parts.iter().all(|part| reason.contains(part))), "{parts:?} in {all:#?}");
    assert!(judgement.fixes.iter().all(|fix| fix.status != PatchStatus::Verified));
}

#[test]
fn a_known_tree_is_verified_and_each_line_stands_in_its_place() {
    let judgement = judged(RUN, WHEEL);
    assert_eq!(reasons(&judgement), Vec::<String>::new());
    assert_eq!(judgement.status, PatchStatus::Verified);
    assert!(judgement.fixes.iter().all(|fix| fix.status == PatchStatus::Verified));
    let edit = edit(&judgement, "gpu/new.cu");
    let expected = RUN
        .replace("static status wheel_run", "#include \"w.h\" // llama-warden:mine/include\nstatic status wheel_run")
        .replace(
            "b->inner;\n",
            "b->inner;\n    ours::guard g(w); // llama-warden:mine/begin\n    (void) g; // llama-warden:mine/begin\n",
        )
        .replace("    return WHEEL_OK;\n}", "    ours::turned(w); // llama-warden:mine/end\n    return WHEEL_OK;\n}");
    assert_eq!(text(edit), expected);
    assert_eq!(edit.before.as_deref(), Some(RUN.as_bytes()));
    let lines: Vec<&str> = expected.lines().collect();
    assert_eq!(edit.inserted.len(), 4);
    for inserted in &edit.inserted {
        assert_eq!(lines[inserted.line - 1], inserted.text);
    }
}

#[test]
fn the_sidecar_stands_beside_its_hook_with_what_the_probes_found() {
    let judgement = judged(RUN, WHEEL);
    let sidecar = edit(&judgement, "gpu/w.h");
    assert_eq!(sidecar.before, None);
    let lines: Vec<String> = text(sidecar).lines().map(str::to_owned).collect();
    assert_eq!(
        (lines.len(), lines[1].as_str(), lines[3].as_str()),
        (4, "#define W_HAS_LOCK 1", "#pragma once")
    );
    assert!(lines[0].starts_with("// llama-warden mine") && lines[2].starts_with("// llama-warden mine"));
    let without = judged(&RUN.replace("static std::mutex wheel_lock;\n", ""), WHEEL);
    assert_eq!(without.status, PatchStatus::Verified);
    assert!(!text(edit(&without, "gpu/w.h")).contains("W_HAS_LOCK"));
}

#[test]
fn the_first_file_that_exists_is_meant() {
    let mut old = tree(RUN, WHEEL);
    let run = old.0.remove("gpu/new.cu").unwrap();
    old.0.insert("gpu/old.cu".to_owned(), run);
    let judgement = judge(&set(), &old).unwrap();
    assert_eq!(judgement.status, PatchStatus::Verified);
    assert!(text(edit(&judgement, "gpu/old.cu")).contains("mine/end"));
}

#[test]
fn the_line_ends_of_a_file_are_kept() {
    let judgement = judged(&RUN.replace('\n', "\r\n"), WHEEL);
    assert_eq!(judgement.status, PatchStatus::Verified, "{:?}", reasons(&judgement));
    let text = text(edit(&judgement, "gpu/new.cu"));
    assert!(text.contains("    ours::turned(w); // llama-warden:mine/end\r\n"));
    assert_eq!(text.matches('\n').count(), text.matches("\r\n").count());
}

#[test]
fn what_a_patch_does_not_find_is_told_with_where_to_look() {
    let run = |from: &str, to: &str| reasons(&judged(&RUN.replace(from, to), WHEEL));
    let wheel = |from: &str, to: &str| reasons(&judged(RUN, &WHEEL.replace(from, to)));
    let mut moved = tree("// empty now\n", WHEEL);
    moved.0.insert("gpu/old.cu".to_owned(), RUN.as_bytes().to_vec());
    let mut none = tree(RUN, WHEEL);
    none.0.remove("gpu/new.cu");
    let applied = judged(RUN, WHEEL);
    let told = [
        run("w->turn(i);", "if (!w->turn(i)) return WHEEL_STUCK;"),
        run("w->turn(i);", "w->turn(i + 1);"),
        run("wheel * w =", "wheel * v ="),
        run("wheel_run(", "wheel_run_all("),
        run("    return WHEEL_OK;\n}", "    if (r->n)\n        return WHEEL_OK;\n}"),
        run("    return WHEEL_OK;\n}", "#ifdef LOUD\n    return WHEEL_OK;\n#endif\n}"),
        wheel("float spokes[8]", "float rods[8]"),
        wheel("int brakes;", "int pads;"),
        reasons(&judge(&set(), &moved).unwrap()),
        reasons(&judge(&set(), &none).unwrap()),
        reasons(&judged(&text(edit(&applied, "gpu/new.cu")), WHEEL)),
    ];
    insta::assert_snapshot!(told.map(|reasons| reasons.join("\n") + "\n\n").concat());
}

#[test]
fn layout_and_comments_do_not_matter() {
    let judgement = judged(&RUN.replace("    for", "\t/* go */ for").replace("// the wheel", ""), WHEEL);
    assert_eq!(judgement.status, PatchStatus::Verified);
}

#[test]
fn a_second_return_is_refused_with_its_line_and_what_to_do() {
    let run = RUN.replace("w->turn(i);", "if (!w->turn(i)) return WHEEL_STUCK;");
    let line = run.lines().position(|line| line.contains("WHEEL_STUCK")).unwrap() + 1;
    refused(
        &judged(&run, WHEEL),
        &["gpu/new.cu:", "probe `one-return`", &format!("lines {line} and "), "hook every return"],
    );
}

#[test]
fn a_renamed_member_is_refused_by_its_probe() {
    let judgement = judged(RUN, &WHEEL.replace("float spokes[8]", "float rods[8]"));
    refused(
        &judgement,
        &["gpu/wheel.h:3", "probe `spokes`", "found: none", "the sidecar counts eight spokes"],
    );
}

#[test]
fn a_function_that_moved_is_refused_and_found() {
    let mut moved = tree("// empty now\n", WHEEL);
    moved.0.insert("gpu/old.cu".to_owned(), RUN.as_bytes().to_vec());
    let judgement = judge(&set(), &moved).unwrap();
    refused(
        &judgement,
        &["gpu/new.cu: hook `end`", "not found: function `wheel_run`", "it is in gpu/old.cu:8"],
    );
}

#[test]
fn a_renamed_function_is_refused_and_the_similar_name_is_told() {
    let judgement = judged(&RUN.replace("wheel_run(", "wheel_run_all("), WHEEL);
    refused(&judgement, &["hook `include`", "similar names there: `wheel_run_all` in line 8"]);
}

#[test]
fn a_missing_file_is_refused() {
    let mut none = tree(RUN, WHEEL);
    none.0.remove("gpu/new.cu");
    refused(
        &judge(&set(), &none).unwrap(),
        &["hook `begin`", "none of its files exists: gpu/new.cu, gpu/old.cu"],
    );
}
