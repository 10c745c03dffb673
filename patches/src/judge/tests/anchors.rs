//! Positions of inserted lines: anchors, comments, alternatives.

use super::*;

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
            assert_eq!(judgement.status, PatchStatus::Unverified, "{:?}", reasons(&judgement));
        } else {
            refused(&judgement, &[why]);
        }
    }
}

#[test]
fn a_line_is_never_put_into_a_comment() {
    let last = "    return WHEEL_OK;\n}\n\nstatic void";
    for (from, to) in [
        // Compilers and fingerprints ignore all of these.
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
    assert_eq!(
        judged(&whole, WHEEL).status,
        PatchStatus::Unverified,
        "{:?}",
        reasons(&judged(&whole, WHEEL))
    );
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
    assert_eq!(judged(&marked, WHEEL).status, PatchStatus::Verified);
    let first = RUN.split_once("static status").unwrap().1;
    refused(&judged(&format!("\u{feff}static status{first}"), WHEEL), &["hook `include`"]);
    let guarded = format!("\u{feff}#ifndef WHEELS\n#define WHEELS\n{RUN}#endif\n");
    assert_eq!(
        judged(&guarded, WHEEL).status,
        PatchStatus::Verified,
        "{:?}",
        reasons(&judged(&guarded, WHEEL))
    );
}
