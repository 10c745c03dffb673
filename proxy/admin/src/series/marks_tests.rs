//! Marks of events, their texts, and their limits.

use serde_json::{Value, json};

use super::*;

fn event(model: Option<&str>, mut kind: Value) -> FleetEvent {
    kind["id"] = json!(1);
    kind["at"] = json!("2026-01-02T03:04:05.678Z");
    kind["generation"] = json!(2);
    if let Some(model) = model {
        kind["model"] = json!(model);
    }
    serde_json::from_value(kind.clone()).unwrap_or_else(|why| panic!("{kind}: {why}"))
}

fn replacement(failed: Option<&str>) -> Value {
    let host = |bytes: u64| json!({"anon": bytes, "swap": 0, "rss": bytes});
    json!({"kind": "recycle_done", "entry": {
        "id": 1, "at": "2026-01-02T03:00:00Z", "model": "m", "replica": 1, "reason": "growth",
        "evidence": {
            "host_bytes": 7, "budget_bytes": null, "requests": 2, "age_s": 1.5, "note": null, "series": "host",
            "words": "host memory leaks 4.4 MiB a request; sk-abcdefghijklmnopqrstuvwxyz0123456789abcd",
            "work": {"requests": 2, "prompt_tokens": 1, "output_tokens": 1, "images": 0},
        },
        "mode": "overlap", "from": 1, "to": 2, "carried_over": 3, "drained": 4, "cut": 2, "gap_ms": 40,
        "drain_ms": 5, "start_ms": 30, "host_before": host(5 << 30), "host_after": host(2 << 30), "helped": true,
        "failed": failed,
    }})
}

#[test]
fn what_was_done_is_marked_with_the_reason_in_words() {
    let failure =
        json!({"kind": "bad_model", "message": "the model could not be loaded", "lines": [], "failures": 2});
    let all = [
        event(Some("m"), replacement(None)),
        event(Some("m"), replacement(Some("the next process did not start"))),
        event(Some("m"), json!({"kind": "makes_room", "wanted": "b"})),
        event(Some("m"), json!({"kind": "unloaded", "idle_ms": 60_000})),
        event(Some("m"), json!({"kind": "crashed", "failure": failure})),
        event(Some("m"), json!({"kind": "canary_began", "binary": "/opt/llama-server", "share": 0.1})),
        event(Some("m"), json!({"kind": "policy_off", "message": "it did not help"})),
        event(
            Some("m"),
            json!({"kind": "driver_leak", "gpu": 0, "bytes": 1, "message": "it did not come back"}),
        ),
        event(
            None,
            json!({"kind": "config_applied", "report": {
                "added": ["a"], "removed": ["b"], "restarted": ["c"], "updated": ["d"], "unchanged": ["e"], "needs_restart": [],
            }}),
        ),
        event(Some("m"), json!({"kind": "ready", "start_ms": 5, "slots": 1})),
        event(Some("m"), json!({"kind": "queue_full", "waiting": 5})),
    ];
    let marks = all
        .iter()
        .flat_map(|event| marks_from_event(event, 0, 600))
        .map(|mark| serde_json::to_string(&mark).unwrap());
    let marks: Vec<String> = marks.collect();
    assert!(!marks.join("").contains("sk-abc"), "{marks:?}");
    insta::assert_snapshot!(marks.join("\n"));
}

#[test]
fn words_have_an_end_and_no_half_letter() {
    let long = "ü".repeat(1000);
    let marks = marks_from_event(&event(Some("m"), json!({"kind": "policy_off", "message": long})), 0, 100);
    assert!(marks[0].words.len() <= 100 && marks[0].words.ends_with("ü…"), "{}", marks[0].words);
}

#[test]
fn what_a_later_version_marks_can_still_be_read() {
    let mark: SeriesMark =
        serde_json::from_value(json!({"at": 5, "model": "m", "kind": "moved", "words": "w", "new": 1}))
            .unwrap();
    assert_eq!(mark.kind, SeriesMarkKind::Warned);
    for kind in SeriesMarkKind::ALL {
        assert_eq!(serde_json::to_value(kind).unwrap(), json!(kind.as_str()));
    }
}

#[test]
fn marks_are_bounded_and_a_model_that_falls_all_day_costs_no_other_its_own() {
    let policy = SeriesPolicy { marks_of_model: 10, marks: 50, ..warden_policies::defaults().series };
    let mark = |model: usize, at: u64| SeriesMark {
        at,
        model: ModelName::new(format!("m{model}")),
        replica: None,
        memory: None,
        generation: None,
        kind: SeriesMarkKind::Crashed,
        words: String::new(),
    };
    let mut marks = MarkHistory::default();
    assert!(marks.add(mark(0, 5), &policy));
    assert!(!marks.add(mark(0, 5), &policy), "it is there");
    (0..1000).for_each(|n| assert!(marks.add(mark(1, n), &policy)));
    assert_eq!(
        (marks.len(), marks.of_model("m0", 0, 9).len(), marks.of_model("m1", 0, 9999).len()),
        (11, 1, 10)
    );
    for model in 2..100 {
        (0..3).for_each(|n| assert!(marks.add(mark(model, n), &policy)));
    }
    assert_eq!((marks.len(), marks.all().count()), (50, 50));
    // After a clock was set back, the marks stay in order.
    let mut marks = MarkHistory::default();
    for at in [5, 9, 7] {
        assert!(marks.add(mark(0, at), &policy));
    }
    assert_eq!(marks.of_model("m0", 6, 9).iter().map(|mark| mark.at).collect::<Vec<_>>(), [7, 9]);
}
