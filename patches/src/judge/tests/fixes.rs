//! Applicable fixes by probes, and requirements of sidecars.

use super::*;

#[test]
fn a_fix_that_has_nothing_to_cure_leaves_the_others() {
    let judgement = judged(RUN, &WHEEL.replace("    int brakes;\n", ""));
    let statuses: Vec<PatchStatus> = judgement.fixes.iter().map(|fix| fix.status).collect();
    assert_eq!(
        (judgement.status, statuses),
        (PatchStatus::Unverified, vec![PatchStatus::Unverified, PatchStatus::NotApplicable])
    );
    assert!(judgement.fixes[1].reason.as_deref().unwrap().contains("does not squeal"));
}

#[test]
fn a_set_without_a_fix_that_applies_does_not_apply() {
    let mut set = set();
    set.fixes.remove(0);
    let judgement = judge(&set, &tree(RUN, &WHEEL.replace("    int brakes;\n", ""))).unwrap();
    assert_eq!((judgement.status, judgement.edits.is_none()), (PatchStatus::NotApplicable, true));
    // The hooks are irrelevant: there is nothing to place.
    assert_eq!(judge(&set, &tree("", "")).unwrap().status, PatchStatus::NotApplicable);
    for probe in &mut set.probes {
        if probe.fix.is_some() {
            probe.on_fail = ProbeConsequence::Refused;
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
            probe.on_fail = ProbeConsequence::Refused;
        }
    }
    let judgement =
        judge(&set, &tree(&RUN.replace("turn(i)", "turn(1)"), &WHEEL.replace("brakes", "pads"))).unwrap();
    let statuses: Vec<PatchStatus> = judgement.fixes.iter().map(|fix| fix.status).collect();
    assert_eq!(
        (judgement.status, statuses),
        (PatchStatus::Unverified, vec![PatchStatus::Unverified, PatchStatus::Refused])
    );
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
    assert_eq!(without.status, PatchStatus::Verified, "{:?}", reasons(&without));
    assert!(!text(edit(&without, "gpu/new.cu")).contains("mine/end"));
    let run = format!("{RUN}\nstatic status wheel_stop(wheel * w) {{\n    return WHEEL_STOPPED;\n}}\n");
    refused(&judge(&set, &tree(&run, WHEEL)).unwrap(), &["hook `end`", "found: none"]);
}

#[test]
fn a_set_level_probe_decides_before_the_hooks() {
    let mut set = set();
    for probe in &mut set.probes {
        if probe.id == "spokes" {
            probe.on_fail = ProbeConsequence::Superseded;
        }
    }
    let judgement = judge(&set, &tree("", "struct wheel { };\n")).unwrap();
    assert_eq!(judgement.status, PatchStatus::Superseded);
    assert!(judgement.reasons[0].to_string().contains("spokes"), "{:?}", reasons(&judgement));
    assert!(judgement.fixes.iter().all(|fix| fix.status == PatchStatus::Superseded));
}

#[test]
fn a_hook_is_placed_only_where_the_container_has_what_it_is_for() {
    let mut set = set();
    let hook = set.hooks.iter_mut().find(|hook| hook.id == "end").unwrap();
    hook.when = Some(CodePattern::try_from(r"\bturn\b".to_owned()).unwrap());
    let lines = |set: &PatchSet| {
        let judgement = judge(set, &tree(RUN, WHEEL)).unwrap();
        assert_eq!(judgement.status, PatchStatus::Verified, "{:?}", reasons(&judgement));
        edit(&judgement, "gpu/new.cu").inserted.iter().filter(|line| line.hook == "end").count()
    };
    assert!(lines(&set) > 0);
    let hook = set.hooks.iter_mut().find(|hook| hook.id == "end").unwrap();
    hook.when = Some(CodePattern::try_from(r"\bbrake\b".to_owned()).unwrap());
    hook.anchor = Some("what nobody wrote;".to_owned());
    assert_eq!(lines(&set), 0);
}

#[test]
fn a_probe_counts_outside_of_what_it_names_and_says_when_it_can_find_nothing() {
    let mut set = set();
    let container = |name: &str| CodeContainer { kind: ContainerKind::Function, name: name.to_owned() };
    let pattern = |text: &str| CodePattern::try_from(text.to_owned()).unwrap();
    set.probes.truncate(1);
    let probe = set.probes.first_mut().unwrap();
    (probe.container, probe.count, probe.min, probe.max) = (None, None, None, Some(0));
    (probe.on_fail, probe.fix, probe.define) = (ProbeConsequence::Refused, None, None);
    probe.files = vec!["gpu/new.cu".into()];
    probe.pattern = pattern(r"->\s*turn\b");
    probe.finds = Some(pattern(r"\bturn\b"));
    let judged = |set: &PatchSet, run: &str| judge(set, &tree(run, WHEEL)).unwrap();
    refused(&judged(&set, RUN), &["expected not to be there", "found: 1"]);
    set.probes[0].outside = vec![container("wheel_run"), container("wheel_gone")];
    assert_eq!(judged(&set, RUN).status, PatchStatus::Verified, "{:?}", reasons(&judged(&set, RUN)));
    let elsewhere = RUN.replace("    delete b;", "    b->inner->turn(0);\n    delete b;");
    refused(&judged(&set, &elsewhere), &["outside of wheel_run, wheel_gone", "found: 1"]);
    // The name has changed, so a count of zero is meaningless.
    refused(&judged(&set, &RUN.replace("turn", "spin")), &["it can find nothing here"]);
}

/// The set with this text as sidecar.
fn with_sidecar(text: &str) -> PatchSet {
    let mut set = set();
    set.sidecars[0].content = text.as_bytes().to_vec();
    set
}

#[test]
fn an_error_that_a_sidecar_is_sure_to_make_is_told_by_the_judge_and_not_by_the_compiler() {
    let needs = "#pragma once\n#ifndef W_HAS_LOCK\n#error \"without the lock it races\"\n#endif\n";
    let set = with_sidecar(needs);
    assert_eq!(judge(&set, &tree(RUN, WHEEL)).unwrap().status, PatchStatus::Verified);
    let unlocked = tree(&RUN.replace("wheel_lock", "wheel_key"), WHEEL);
    let judgement = judge(&set, &unlocked).unwrap();
    refused(&judgement, &["sidecar `w.h`", "its line 3 says: without the lock it races"]);
    // Macros of the compiler are unknown.
    let unknown =
        with_sidecar("#pragma once\n#if !defined(W_HAS_LOCK) && defined(_WIN32)\n#error \"no\"\n#endif\n");
    assert_eq!(judge(&unknown, &unlocked).unwrap().status, PatchStatus::Verified);
    // A set that is not applicable has no errors.
    let mut nothing = with_sidecar(needs);
    nothing.fixes.remove(0);
    let unbraked = tree(&RUN.replace("wheel_lock", "wheel_key"), &WHEEL.replace("    int brakes;\n", ""));
    assert_eq!(judge(&nothing, &unbraked).unwrap().status, PatchStatus::NotApplicable);
}

#[test]
fn what_a_hook_guards_is_not_counted_where_it_is_placed_and_counts_where_it_is_not() {
    let mut set = set();
    let mut probe = set.probes[0].clone();
    probe.id = "who-turns".to_owned();
    (probe.container, probe.count, probe.max) = (None, None, Some(0));
    probe.pattern = CodePattern::try_from(r"->turn\(".to_owned()).unwrap();
    probe.guarded = vec!["end".to_owned()];
    set.probes.push(probe);
    let status = |set: &PatchSet, run: &str| judge(set, &tree(run, WHEEL)).unwrap();
    assert_eq!(status(&set, RUN).status, PatchStatus::Verified);
    let elsewhere = RUN.replace("    delete b;", "    ((wheel *) b)->turn(0);");
    refused(&status(&set, &elsewhere), &["probe `who-turns`", "outside of wheel_run; found: 1, in line 20"]);
    // The hook is not needed here, so nothing is guarded.
    for hook in &mut set.hooks {
        if hook.id == "end" {
            hook.optional = true;
            hook.when = Some(CodePattern::try_from("never".to_owned()).unwrap());
        }
    }
    refused(&status(&set, RUN), &["probe `who-turns`", "not to be there; found: 1, in line 12"]);
}
