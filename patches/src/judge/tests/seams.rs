//! Reviewed versions of upstream's code, and trees that are patched already.

use super::*;

#[test]
fn a_changed_body_is_unverified_and_the_change_is_shown() {
    let run = RUN
        .replace("w->turn(i);", "w->turn(i + 1);")
        .replace("    return WHEEL_OK;\n}", "    w->rest();\n    return WHEEL_OK;\n}");
    let judgement = judged(&run, WHEEL);
    assert_eq!(judgement.status, PatchStatus::Unverified);
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
    assert_eq!(judgement.fixes[0].status, PatchStatus::Unverified);
    assert_eq!(judgement.seams[0].known, None);
    assert_eq!(judgement.seams[1].known.as_deref(), Some("b1"));
}

#[test]
fn an_optional_seam_may_be_absent_and_another_may_not() {
    let mut set = set();
    assert_eq!(judge(&set, &tree(RUN, WHEEL)).unwrap().seams[2].hash, "absent");
    for seam in &mut set.seams {
        seam.optional = false;
    }
    set.fingerprints = crate::set::fingerprints::SeamFingerprints::default();
    let judgement = judge(&set, &tree(RUN, WHEEL)).unwrap();
    assert_eq!(judgement.status, PatchStatus::Unverified);
    assert!(
        reasons(&judgement).iter().any(|reason| reason.contains("seam `lever`: struct `lever` is not there"))
    );
}

#[test]
fn an_applied_tree_is_refused_and_its_fingerprints_are_those_of_the_plain_one() {
    let plain = tree(RUN, WHEEL);
    let first = judge(&set(), &plain).unwrap();
    let mut applied = OverlayTree::new(&plain);
    applied.add(first.edits.as_ref().unwrap());
    let again = judge(&set(), &applied).unwrap();
    refused(&again, &["gpu/new.cu:8: hook `include`", "is here already: restore the file first"]);
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
    let mut overlay = OverlayTree::new(&plain);
    overlay.add(first.edits.as_ref().unwrap());
    let second = judge(&other, &overlay).unwrap();
    assert_eq!(second.status, PatchStatus::Verified, "{:?}", reasons(&second));
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
        &["gpu/w.h: sidecar `w.h`: a file of this name is there already: remove it first"],
    );
}

#[test]
fn equal_contents_are_judged_once() {
    let judge = CachingJudge::default();
    let set = set();
    let first = judge.judge(&set, &tree(RUN, WHEEL)).unwrap();
    let mut same = tree(RUN, WHEEL);
    same.0.insert("other".to_owned(), Vec::new());
    assert!(std::sync::Arc::ptr_eq(&first, &judge.judge(&set, &same).unwrap()));
    assert_eq!((judge.judged(), first.status, first.edits.is_none()), (1, PatchStatus::Verified, true));
    assert_eq!(judge.judge(&set, &tree(RUN, "")).unwrap().status, PatchStatus::Refused);
    assert_eq!(judge.judged(), 2);
}

#[test]
fn what_is_learned_is_known_keeps_its_place_and_is_learned_once() {
    let mut set = set();
    let changed = tree(&RUN.replace("w->turn(i)", "w->roll(i)"), WHEEL);
    assert_eq!(judge(&set, &changed).unwrap().status, PatchStatus::Unverified);
    let seen = fingerprint(&set, &changed).unwrap();
    let more = add_versions(&set.fingerprints, &seen, "b2", "def", "wheels");
    assert_eq!(
        more.versions("run").iter().map(|known| known.label.as_str()).collect::<Vec<_>>(),
        ["b1", "b2"]
    );
    assert_eq!(more.versions("wheel").len(), 1);
    assert_eq!(add_versions(&more, &seen, "b3", "ghi", "wheels"), more);
    let text = more.to_json().unwrap();
    assert_eq!(
        crate::set::fingerprints::SeamFingerprints::parse("x", text.as_bytes(), &set.seams).unwrap(),
        more
    );
    set.fingerprints = more;
    assert_eq!(judge(&set, &changed).unwrap().status, PatchStatus::Verified);
}

#[test]
fn a_change_of_the_order_alone_is_told() {
    let mut wheel = WHEEL.replace("    int brakes;\n", "");
    wheel = wheel.replace("    float spokes[8];\n", "    int brakes;\n    float spokes[8];\n");
    let judgement = judged(RUN, &wheel);
    assert_eq!(judgement.status, PatchStatus::Unverified);
    assert!(reasons(&judgement)[0].contains("gone") || reasons(&judgement)[0].contains("order"));
}
