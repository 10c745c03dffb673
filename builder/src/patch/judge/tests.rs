//! Invented code in the shape of upstream's, and what may happen to it.

use std::collections::BTreeMap;
use std::fs;

use super::super::fingerprints::learn;
use super::super::set::{OnFail, Pattern};
use super::super::{Catalogue, Container, ContainerKind, FileEdit, Judgement, PatchSet, Status, Tree};
use super::*;
use crate::source::Revision;

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

impl Tree for Files {
    fn read(&self, path: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.0.get(path).cloned())
    }

    fn revision(&self) -> Revision {
        Revision::default()
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
    Catalogue::default().with_folder(&path).unwrap().set("mine").unwrap().clone()
}

/// The set, which knows the tree as it is above.
fn set() -> PatchSet {
    let mut set = unlearned();
    let seen = fingerprint(&set, &tree(RUN, WHEEL)).unwrap();
    set.fingerprints = learn(&set.fingerprints, &seen, "b1", "abc", "wheels");
    set
}

fn judged(run: &str, wheel: &str) -> Judgement {
    judge(&set(), &tree(run, wheel)).unwrap()
}

fn edit<'a>(judgement: &'a Judgement, path: &str) -> &'a FileEdit {
    judgement.edits.as_ref().unwrap().0.iter().find(|edit| edit.path == path).unwrap()
}

fn text(edit: &FileEdit) -> String {
    String::from_utf8(edit.after.clone()).unwrap()
}

fn reasons(judgement: &Judgement) -> Vec<String> {
    let all: Vec<String> = judgement.reasons.iter().map(ToString::to_string).collect();
    assert!(all.iter().all(|reason| !reason.contains('\n')), "{all:?}");
    all
}

/// Refused, with nothing to apply, for a reason that has all of these in it.
fn refused(judgement: &Judgement, parts: &[&str]) {
    let all = reasons(judgement);
    assert_eq!((judgement.status, judgement.edits.is_none()), (Status::Refused, true), "{all:#?}");
    assert!(all.iter().any(|reason| parts.iter().all(|part| reason.contains(part))), "{parts:?} in {all:#?}");
    assert!(judgement.fixes.iter().all(|fix| fix.status != Status::Verified));
}

#[test]
fn a_known_tree_is_verified_and_each_line_stands_in_its_place() {
    let judgement = judged(RUN, WHEEL);
    assert_eq!(reasons(&judgement), Vec::<String>::new());
    assert_eq!(judgement.status, Status::Verified);
    assert!(judgement.fixes.iter().all(|fix| fix.status == Status::Verified));
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
    assert_eq!(without.status, Status::Verified);
    assert!(!text(edit(&without, "gpu/w.h")).contains("W_HAS_LOCK"));
}

#[test]
fn the_first_file_that_exists_is_meant() {
    let mut old = tree(RUN, WHEEL);
    let run = old.0.remove("gpu/new.cu").unwrap();
    old.0.insert("gpu/old.cu".to_owned(), run);
    let judgement = judge(&set(), &old).unwrap();
    assert_eq!(judgement.status, Status::Verified);
    assert!(text(edit(&judgement, "gpu/old.cu")).contains("mine/end"));
}

#[test]
fn the_line_ends_of_a_file_are_kept() {
    let judgement = judged(&RUN.replace('\n', "\r\n"), WHEEL);
    assert_eq!(judgement.status, Status::Verified, "{:?}", reasons(&judgement));
    let text = text(edit(&judgement, "gpu/new.cu"));
    assert!(text.contains("    ours::turned(w); // llama-warden:mine/end\r\n"));
    assert_eq!(text.matches('\n').count(), text.matches("\r\n").count());
}

#[test]
fn layout_and_comments_do_not_matter() {
    let judgement = judged(&RUN.replace("    for", "\t/* go */ for").replace("// the wheel", ""), WHEEL);
    assert_eq!(judgement.status, Status::Verified);
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
fn a_changed_body_is_unverified_and_the_change_is_shown() {
    let run = RUN
        .replace("w->turn(i);", "w->turn(i + 1);")
        .replace("    return WHEEL_OK;\n}", "    w->rest();\n    return WHEEL_OK;\n}");
    let judgement = judged(&run, WHEEL);
    assert_eq!(judgement.status, Status::Unverified);
    assert!(judgement.edits.is_some());
    let all = reasons(&judgement);
    assert_eq!(all.len(), 1, "{all:#?}");
    for part in [
        "gpu/new.cu:12: seam `run`",
        "against b1 (wheels abc)",
        "line 12 `w->turn(i + 1);`",
        "line 15 `w->rest();`",
        "1 of its",
    ] {
        assert!(all[0].contains(part), "{part} in {}", all[0]);
    }
    assert_eq!(judgement.fixes[0].status, Status::Unverified);
    assert_eq!(judgement.seams[0].known, None);
    assert_eq!(judgement.seams[1].known.as_deref(), Some("b1"));
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

#[test]
fn an_anchor_that_is_there_twice_is_refused() {
    let run = RUN.replace("    for (", "    if (r->n == 0) { return WHEEL_OK; }\n    for (");
    refused(
        &judged(&run, WHEEL),
        &["hook `end`", "expected once in function `wheel_run`, found: 2, in lines 11 and 16"],
    );
}

#[test]
fn an_anchor_in_a_comment_or_in_dead_code_does_not_count() {
    for (from, to) in [
        ("    return WHEEL_OK;\n}", "    // return WHEEL_OK;\n    leave();\n}"),
        ("    return WHEEL_OK;\n}", "#if 0\n    return WHEEL_OK;\n#endif\n    leave();\n}"),
    ] {
        let judgement = judged(&RUN.replace(from, to), WHEEL);
        refused(&judgement, &["hook `end`", "found: none", "is a comment, a string or never compiled"]);
    }
}

#[test]
fn an_anchor_that_vanished_says_where_its_words_are() {
    let judgement = judged(&RUN.replace("    return WHEEL_OK;\n}", "    return done(WHEEL_OK);\n}"), WHEEL);
    refused(&judgement, &["hook `end`", "`WHEEL_OK` is in line 15"]);
}

#[test]
fn a_line_is_never_put_between_an_if_and_what_it_governs() {
    for (from, to, why) in [
        ("    return WHEEL_OK;\n}", "    if (w->done())\n        return WHEEL_OK;\n}", "belongs to an `if`"),
        ("    return WHEEL_OK;\n}", "    if (w->done()) return WHEEL_OK;\n}", "belongs to an `if`"),
        (
            "    return WHEEL_OK;\n}",
            "    { w->done(); return WHEEL_OK; }\n}",
            "another statement stands on the same line",
        ),
        ("(wheel *) b->inner;", "\n        (wheel *) b->inner;", "goes on in the next line"),
        (
            "(wheel *) b->inner;",
            "(wheel *) b->inner; w->grease();",
            "another statement stands on the same line",
        ),
        (
            "    wheel * w =",
            "    for (int j = 0; j < 2; ++j)\n        wheel * w =",
            "in parentheses before it",
        ),
        (
            "    return WHEEL_OK;\n}",
            "    switch (r->n) { default:\n    case 1: return WHEEL_OK; }\n}",
            "another statement",
        ),
        (
            "    wheel * w =",
            "    std::mutex m; std::lock_guard<std::mutex> l(m);\n    my::wheel * w =",
            "hook `include`",
        ),
        ("    wheel * w =", "    wheel * v,\n        x(); wheel * w =", "hook `include`"),
    ] {
        let run = RUN.replace(from, to);
        let judgement = judged(&run, WHEEL);
        if why == "hook `include`" {
            assert_eq!(judgement.status, Status::Unverified, "{:?}", reasons(&judgement));
        } else {
            refused(&judgement, &[why]);
        }
    }
}

#[test]
fn two_definitions_where_one_is_expected_are_refused() {
    let twice = format!("{RUN}\n#ifdef SLOW\nstatic status wheel_run(int n) {{ return n; }}\n#endif\n");
    refused(
        &judged(&twice, WHEEL),
        &["hook `end`", "expected once, found 2 times: function `wheel_run`, in lines 8 and 24"],
    );
}

#[test]
fn a_function_in_if_0_is_not_there() {
    refused(&judged(&format!("#if 0\n{RUN}#endif\n"), WHEEL), &["not found: function `wheel_run`"]);
}

#[test]
fn braces_that_depend_on_conditionals_are_refused() {
    let run = RUN.replace("    for (", "#ifdef FAST\n    if (r) {\n#endif\n    for (");
    refused(&judged(&run, WHEEL), &["gpu/new.cu:11: hook `end`", "conditionals", "lines 11-13"]);
}

#[test]
fn a_fix_that_has_nothing_to_cure_leaves_the_others() {
    let judgement = judged(RUN, &WHEEL.replace("    int brakes;\n", ""));
    let statuses: Vec<Status> = judgement.fixes.iter().map(|fix| fix.status).collect();
    assert_eq!(
        (judgement.status, statuses),
        (Status::Unverified, vec![Status::Unverified, Status::NotApplicable])
    );
    assert!(judgement.fixes[1].reason.as_deref().unwrap().contains("does not squeal"));
}

#[test]
fn a_set_without_a_fix_that_applies_does_not_apply() {
    let mut set = set();
    set.fixes.remove(0);
    let judgement = judge(&set, &tree(RUN, &WHEEL.replace("    int brakes;\n", ""))).unwrap();
    assert_eq!((judgement.status, judgement.edits.is_none()), (Status::NotApplicable, true));
    // Whatever its hooks find: nothing is to be placed.
    assert_eq!(judge(&set, &tree("", "")).unwrap().status, Status::NotApplicable);
    for probe in &mut set.probes {
        if probe.fix.is_some() {
            probe.on_fail = OnFail::Refused;
        }
    }
    let judgement = judge(&set, &tree(RUN, &WHEEL.replace("    int brakes;\n", ""))).unwrap();
    refused(&judgement, &["probe `brakes`", "does not squeal"]);
}

#[test]
fn a_fix_that_is_refused_leaves_the_others() {
    let mut set = set();
    for probe in &mut set.probes {
        if probe.fix.is_some() {
            probe.on_fail = OnFail::Refused;
        }
    }
    let judgement =
        judge(&set, &tree(&RUN.replace("turn(i)", "turn(1)"), &WHEEL.replace("brakes", "pads"))).unwrap();
    let statuses: Vec<Status> = judgement.fixes.iter().map(|fix| fix.status).collect();
    assert_eq!((judgement.status, statuses), (Status::Unverified, vec![Status::Unverified, Status::Refused]));
}

#[test]
fn an_optional_hook_needs_no_container_but_an_anchor_in_it() {
    let mut set = set();
    for hook in &mut set.hooks {
        if hook.id == "end" {
            hook.optional = true;
            hook.container.as_mut().unwrap().name = "wheel_stop".to_owned();
        }
    }
    let without = judge(&set, &tree(RUN, WHEEL)).unwrap();
    assert_eq!(without.status, Status::Verified, "{:?}", reasons(&without));
    assert!(!text(edit(&without, "gpu/new.cu")).contains("mine/end"));
    let run = format!("{RUN}\nstatic status wheel_stop(wheel * w) {{\n    return WHEEL_STOPPED;\n}}\n");
    refused(&judge(&set, &tree(&run, WHEEL)).unwrap(), &["hook `end`", "found: none"]);
}

#[test]
fn a_set_level_probe_decides_before_the_hooks() {
    let mut set = set();
    for probe in &mut set.probes {
        if probe.id == "spokes" {
            probe.on_fail = OnFail::Superseded;
        }
    }
    let judgement = judge(&set, &tree("", "struct wheel { };\n")).unwrap();
    assert_eq!(judgement.status, Status::Superseded);
    assert!(judgement.reasons[0].to_string().contains("spokes"), "{:?}", reasons(&judgement));
    assert!(judgement.fixes.iter().all(|fix| fix.status == Status::Superseded));
}

#[test]
fn an_optional_seam_may_be_absent_and_another_may_not() {
    let mut set = set();
    assert_eq!(judge(&set, &tree(RUN, WHEEL)).unwrap().seams[2].hash, "absent");
    for seam in &mut set.seams {
        seam.optional = false;
    }
    set.fingerprints = super::super::Fingerprints::default();
    let judgement = judge(&set, &tree(RUN, WHEEL)).unwrap();
    assert_eq!(judgement.status, Status::Unverified);
    assert!(
        reasons(&judgement).iter().any(|reason| reason.contains("seam `lever`: struct `lever` is not there"))
    );
}

#[test]
fn an_applied_tree_is_refused_and_its_fingerprints_are_those_of_the_plain_one() {
    let plain = tree(RUN, WHEEL);
    let first = judge(&set(), &plain).unwrap();
    let mut applied = Overlay::new(&plain);
    applied.add(first.edits.as_ref().unwrap());
    let again = judge(&set(), &applied).unwrap();
    refused(&again, &["gpu/new.cu:8: hook `include`", "is here already: take it out first"]);
    assert_eq!(again.seams, {
        let mut moved = first.seams;
        moved[0].lines = Some((9, 20));
        moved
    });
}

#[test]
fn two_sets_go_into_one_file_one_after_the_other() {
    let plain = tree(RUN, WHEEL);
    let mut other = set();
    other.id = "other".to_owned();
    for sidecar in &mut other.sidecars {
        sidecar.file = "v.h".to_owned();
    }
    let first = judge(&set(), &plain).unwrap();
    let mut overlay = Overlay::new(&plain);
    overlay.add(first.edits.as_ref().unwrap());
    let second = judge(&other, &overlay).unwrap();
    assert_eq!(second.status, Status::Verified, "{:?}", reasons(&second));
    let text = text(edit(&second, "gpu/new.cu"));
    let place = |mark: &str| text.find(mark).unwrap();
    assert!(place("mine/end") < place("other/end") && place("other/end") < place("    return WHEEL_OK;\n}"));
}

#[test]
fn a_foreign_file_of_the_sidecars_name_is_not_overwritten() {
    let mut taken = tree(RUN, WHEEL);
    taken.0.insert("gpu/w.h".to_owned(), b"theirs".to_vec());
    refused(
        &judge(&set(), &taken).unwrap(),
        &["gpu/w.h: sidecar `w.h`: a file of this name is there already"],
    );
}

#[test]
fn equal_contents_are_judged_once() {
    let judge = Judge::default();
    let set = set();
    let first = judge.judge(&set, &tree(RUN, WHEEL)).unwrap();
    let mut same = tree(RUN, WHEEL);
    same.0.insert("other".to_owned(), Vec::new());
    assert!(std::sync::Arc::ptr_eq(&first, &judge.judge(&set, &same).unwrap()));
    assert_eq!((judge.judged(), first.status, first.edits.is_none()), (1, Status::Verified, true));
    assert_eq!(judge.judge(&set, &tree(RUN, "")).unwrap().status, Status::Refused);
    assert_eq!(judge.judged(), 2);
}

#[test]
fn what_is_learned_is_known_keeps_its_place_and_is_learned_once() {
    let mut set = set();
    let changed = tree(&RUN.replace("w->turn(i)", "w->roll(i)"), WHEEL);
    assert_eq!(judge(&set, &changed).unwrap().status, Status::Unverified);
    let seen = fingerprint(&set, &changed).unwrap();
    let more = learn(&set.fingerprints, &seen, "b2", "def", "wheels");
    assert_eq!(more.of("run").iter().map(|known| known.label.as_str()).collect::<Vec<_>>(), ["b1", "b2"]);
    assert_eq!(more.of("wheel").len(), 1);
    assert_eq!(learn(&more, &seen, "b3", "ghi", "wheels"), more);
    let text = more.to_json().unwrap();
    assert_eq!(super::super::fingerprints::parse("x", text.as_bytes(), &set.seams).unwrap(), more);
    set.fingerprints = more;
    assert_eq!(judge(&set, &changed).unwrap().status, Status::Verified);
}

#[test]
fn a_change_of_the_order_alone_is_told() {
    let mut wheel = WHEEL.replace("    int brakes;\n", "");
    wheel = wheel.replace("    float spokes[8];\n", "    int brakes;\n    float spokes[8];\n");
    let judgement = judged(RUN, &wheel);
    assert_eq!(judgement.status, Status::Unverified);
    assert!(reasons(&judgement)[0].contains("gone") || reasons(&judgement)[0].contains("order"));
}

#[test]
fn a_line_is_never_put_into_a_comment() {
    let last = "    return WHEEL_OK;\n}\n\nstatic void";
    for (from, to) in [
        // Compilers, and fingerprints, pass over all of these.
        (last, last.replace("    return", "    /* turned\n       well */ return")),
        (last, last.replace("    return", "    // turned \\\n    well\n    /* and\n */ return")),
        ("b->inner;\n", "b->inner; /* the\n   inner one */\n".to_owned()),
        ("b->inner;\n", "b->inner; // the inner \\\n   one\n".to_owned()),
    ] {
        let run = RUN.replace(from, &to);
        assert_ne!(run, RUN);
        refused(&judged(&run, WHEEL), &["hook `", "part of a comment"]);
    }
}

#[test]
fn a_comment_goes_on_behind_a_backslash_and_blanks_as_for_compilers() {
    let last = "    return WHEEL_OK;\n}\n\nstatic void";
    let run = RUN.replace(last, &last.replace("    return", "    // not \\ \t\n    return"));
    refused(&judged(&run, WHEEL), &["hook `end`", "it is a comment"]);
}

#[test]
fn a_line_is_never_put_into_one_alternative_of_a_head() {
    let head = "static status wheel_run(back * b, road * r) {";
    let run = RUN.replace(
        head,
        &format!("#ifdef LOUD\nstatic status wheel_run(loud * b, road * r) {{\n#else\n{head}\n#endif"),
    );
    refused(&judged(&run, WHEEL), &["hook `include`", "one alternative of a conditional"]);
    let run = RUN.replace("static status wheel_run", "#ifdef QUIET\nstatic\n#endif\nstatus wheel_run");
    refused(&judged(&run, WHEEL), &["hook `include`", "one alternative of a conditional"]);
    let whole = format!(
        "#ifdef WHEELS\n{}#endif\n",
        RUN.replace("    for", "#if A\n    a();\n#else\n#endif\n    for")
    );
    assert_eq!(judged(&whole, WHEEL).status, Status::Unverified, "{:?}", reasons(&judged(&whole, WHEEL)));
}

#[test]
fn an_anchor_in_a_macro_or_in_if_0_in_parentheses_is_no_place() {
    let last = "    return WHEEL_OK;\n}\n\nstatic void";
    let run = RUN.replace(last, &last.replace("    return", "#define DONE return WHEEL_OK;\n    DONE //"));
    refused(&judged(&run, WHEEL), &["hook `end`", "preprocessor line"]);
    let run =
        RUN.replace(last, &last.replace("    return WHEEL_OK;", "#if (0)\n    return WHEEL_OK;\n#endif"));
    refused(&judged(&run, WHEEL), &["hook `end`", "never compiled"]);
}

#[test]
fn nothing_is_put_before_a_byte_order_mark() {
    let marked = format!("\u{feff}{RUN}");
    assert_eq!(judged(&marked, WHEEL).status, Status::Verified);
    let first = RUN.split_once("static status").unwrap().1;
    refused(&judged(&format!("\u{feff}static status{first}"), WHEEL), &["hook `include`"]);
    let guarded = format!("\u{feff}#ifndef WHEELS\n#define WHEELS\n{RUN}#endif\n");
    assert_eq!(judged(&guarded, WHEEL).status, Status::Verified, "{:?}", reasons(&judged(&guarded, WHEEL)));
}

#[test]
fn what_is_only_compiled_under_a_condition_is_not_what_somebody_looked_at() {
    for (condition, end) in [
        ("#ifdef NEVER", "#endif"),
        ("#if NEVER", "#endif"),
        ("#if defined(NEVER) || SELDOM", "#endif"),
        ("#ifndef ALWAYS", "#endif"),
        ("#i\\\nfdef NEVER", "#endif"),
        ("#ifdef A\n#else", "#endif"),
        ("#ifdef A\n#elif B", "#else\n#endif"),
    ] {
        let judgement = judged(&format!("{condition}\n{RUN}\n{end}\n"), WHEEL);
        assert_eq!(judgement.status, Status::Unverified, "{condition}: {:?}", reasons(&judgement));
        let said = reasons(&judgement).join("\n");
        assert!(said.contains("only compiled under") && said.contains("seam `run`"), "{condition}: {said}");
    }
    for always in ["#if 1", "#if 1 || NEVER", "#if 0\n#else", "#if 0\n#elif 1"] {
        let judgement = judged(&format!("{always}\n{RUN}\n#endif\n"), WHEEL);
        assert_eq!(judgement.status, Status::Verified, "{always}: {:?}", reasons(&judgement));
    }
}

#[test]
fn what_is_never_compiled_is_no_place_however_that_is_said() {
    for never in [
        "#if 0 && 1",
        "#if 1 && 0",
        "#if !1",
        "#if NEVER && 0",
        "#if 1\n#else",
        "#if 1\n#elif WHEELS",
        "#\\\nif 0",
    ] {
        let judgement = judged(&format!("{never}\n{RUN}\n#endif\n"), WHEEL);
        refused(&judgement, &["hook `end`", "not found"]);
    }
}

#[test]
fn lines_are_spliced_before_comments_are_looked_for() {
    let anchor = "    return WHEEL_OK;";
    for hidden in [
        "/\\\n/ no \\\n    return WHEEL_OK;",
        "/\\\n*\n    return WHEEL_OK;\n*\\\n/",
        "/\\ \r\n*\n    return WHEEL_OK;\n*/",
    ] {
        let run = RUN.replacen(anchor, hidden, 1);
        assert_ne!(run, RUN);
        let judgement = judged(&run, WHEEL);
        refused(&judgement, &["hook `end`", "found: none"]);
    }
}

#[test]
fn a_line_under_a_condition_needs_a_seam_that_says_that_somebody_looked() {
    let mut set = set();
    set.seams.retain(|seam| seam.id != "run");
    let anchor = "    return WHEEL_OK;\n}\n\nstatic";
    let inside =
        RUN.replacen(anchor, "#ifdef LOUD\n    log(1);\n    return WHEEL_OK;\n#endif\n}\n\nstatic", 1);
    assert_ne!(inside, RUN);
    for run in [inside, format!("#ifdef LOUD\n{RUN}\n#endif\n")] {
        let judgement = judge(&set, &tree(&run, WHEEL)).unwrap();
        assert_eq!(judgement.status, Status::Unverified, "{:?}", reasons(&judgement));
        let said = reasons(&judgement).join("\n");
        assert!(said.contains("hook `end`") && said.contains("only compiled under `#ifdef LOUD`"), "{said}");
    }
    assert_eq!(judge(&set, &tree(RUN, WHEEL)).unwrap().status, Status::Verified);
}

#[test]
fn a_hook_is_placed_only_where_the_container_has_what_it_is_for() {
    let mut set = set();
    let hook = set.hooks.iter_mut().find(|hook| hook.id == "end").unwrap();
    hook.when = Some(Pattern::try_from(r"\bturn\b".to_owned()).unwrap());
    let lines = |set: &PatchSet| {
        let judgement = judge(set, &tree(RUN, WHEEL)).unwrap();
        assert_eq!(judgement.status, Status::Verified, "{:?}", reasons(&judgement));
        edit(&judgement, "gpu/new.cu").inserted.iter().filter(|line| line.hook == "end").count()
    };
    assert!(lines(&set) > 0);
    let hook = set.hooks.iter_mut().find(|hook| hook.id == "end").unwrap();
    hook.when = Some(Pattern::try_from(r"\bbrake\b".to_owned()).unwrap());
    hook.anchor = Some("what nobody wrote;".to_owned());
    assert_eq!(lines(&set), 0);
}

#[test]
fn a_probe_counts_outside_of_what_it_names_and_says_when_it_can_find_nothing() {
    let mut set = set();
    let container = |name: &str| Container { kind: ContainerKind::Function, name: name.to_owned() };
    let pattern = |text: &str| Pattern::try_from(text.to_owned()).unwrap();
    set.probes.truncate(1);
    let probe = set.probes.first_mut().unwrap();
    (probe.container, probe.count, probe.min, probe.max) = (None, None, None, Some(0));
    (probe.on_fail, probe.fix, probe.define) = (OnFail::Refused, None, None);
    probe.files = vec!["gpu/new.cu".into()];
    probe.pattern = pattern(r"->\s*turn\b");
    probe.finds = Some(pattern(r"\bturn\b"));
    let judged = |set: &PatchSet, run: &str| judge(set, &tree(run, WHEEL)).unwrap();
    refused(&judged(&set, RUN), &["expected not to be there", "found: 1"]);
    set.probes[0].outside = vec![container("wheel_run"), container("wheel_gone")];
    assert_eq!(judged(&set, RUN).status, Status::Verified, "{:?}", reasons(&judged(&set, RUN)));
    let elsewhere = RUN.replace("    delete b;", "    b->inner->turn(0);\n    delete b;");
    refused(&judged(&set, &elsewhere), &["outside of wheel_run, wheel_gone", "found: 1"]);
    // The name has changed: a count of none would mean nothing.
    refused(&judged(&set, &RUN.replace("turn", "spin")), &["it can find nothing here"]);
}

/// The set whose sidecar has this text.
fn with_sidecar(text: &str) -> PatchSet {
    let mut set = set();
    set.sidecars[0].content = text.as_bytes().to_vec();
    set
}

#[test]
fn an_error_that_a_sidecar_is_sure_to_make_is_told_by_the_judge_and_not_by_the_compiler() {
    let needs = "#pragma once\n#ifndef W_HAS_LOCK\n#error \"without the lock it races\"\n#endif\n";
    let set = with_sidecar(needs);
    assert_eq!(judge(&set, &tree(RUN, WHEEL)).unwrap().status, Status::Verified);
    let unlocked = tree(&RUN.replace("wheel_lock", "wheel_key"), WHEEL);
    let judgement = judge(&set, &unlocked).unwrap();
    refused(&judgement, &["sidecar `w.h`", "its line 3 says: without the lock it races"]);
    // What a compiler knows is its affair.
    let unknown =
        with_sidecar("#pragma once\n#if !defined(W_HAS_LOCK) && defined(_WIN32)\n#error \"no\"\n#endif\n");
    assert_eq!(judge(&unknown, &unlocked).unwrap().status, Status::Verified);
    // What is not to be applied makes no error.
    let mut nothing = with_sidecar(needs);
    nothing.fixes.remove(0);
    let unbraked = tree(&RUN.replace("wheel_lock", "wheel_key"), &WHEEL.replace("    int brakes;\n", ""));
    assert_eq!(judge(&nothing, &unbraked).unwrap().status, Status::NotApplicable);
}

#[test]
fn what_a_hook_guards_is_not_counted_where_it_is_placed_and_counts_where_it_is_not() {
    let mut set = set();
    let mut probe = set.probes[0].clone();
    probe.id = "who-turns".to_owned();
    (probe.container, probe.count, probe.max) = (None, None, Some(0));
    probe.pattern = Pattern::try_from(r"->turn\(".to_owned()).unwrap();
    probe.guarded = vec!["end".to_owned()];
    set.probes.push(probe);
    let status = |set: &PatchSet, run: &str| judge(set, &tree(run, WHEEL)).unwrap();
    assert_eq!(status(&set, RUN).status, Status::Verified);
    let elsewhere = RUN.replace("    delete b;", "    ((wheel *) b)->turn(0);");
    refused(&status(&set, &elsewhere), &["probe `who-turns`", "outside of wheel_run; found: 1, in line 20"]);
    // The hook sees that it is not needed here: then nothing guards.
    for hook in &mut set.hooks {
        if hook.id == "end" {
            hook.optional = true;
            hook.when = Some(Pattern::try_from("never".to_owned()).unwrap());
        }
    }
    refused(&status(&set, RUN), &["probe `who-turns`", "not to be there; found: 1, in line 12"]);
}
