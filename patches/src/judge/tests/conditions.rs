//! Code in conditionals, and duplicate or missing definitions.

use super::*;

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
        assert_eq!(judgement.status, PatchStatus::Unverified, "{condition}: {:?}", reasons(&judgement));
        let said = reasons(&judgement).join("\n");
        assert!(said.contains("only compiled under") && said.contains("seam `run`"), "{condition}: {said}");
    }
    for always in ["#if 1", "#if 1 || NEVER", "#if 0\n#else", "#if 0\n#elif 1"] {
        let judgement = judged(&format!("{always}\n{RUN}\n#endif\n"), WHEEL);
        assert_eq!(judgement.status, PatchStatus::Verified, "{always}: {:?}", reasons(&judgement));
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
        assert_eq!(judgement.status, PatchStatus::Unverified, "{:?}", reasons(&judgement));
        let said = reasons(&judgement).join("\n");
        assert!(said.contains("hook `end`") && said.contains("only compiled under `#ifdef LOUD`"), "{said}");
    }
    assert_eq!(judge(&set, &tree(RUN, WHEEL)).unwrap().status, PatchStatus::Verified);
}
