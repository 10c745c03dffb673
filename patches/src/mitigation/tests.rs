//! The embedded catalogue, and resolving with invented fixes.

use super::*;
use crate::set::{AffectedBuilds, FixValue, FixVariable, SetFix, UpstreamState, VariableKind};

fn variable(name: &str, kind: VariableKind, default: Option<i64>) -> FixVariable {
    FixVariable {
        name: name.to_owned(),
        kind,
        default: default.map(FixValue::Integer),
        min: (kind == VariableKind::Integer).then_some(1.0),
        max: (kind == VariableKind::Integer).then_some(1000.0),
        unit: "graphs".to_owned(),
        text: "does things.".to_owned(),
    }
}

fn fix(id: &str, variables: Vec<FixVariable>) -> SetFix {
    SetFix {
        id: id.to_owned(),
        title: "a cap".to_owned(),
        symptom: "it grows".to_owned(),
        references: Vec::new(),
        memory: Vec::new(),
        affects: AffectedBuilds { backends: vec!["cuda".into(), "hip".into()], ..AffectedBuilds::default() },
        risk: String::new(),
        cost: String::new(),
        marker: format!("llama-warden fix {id}"),
        upstream: UpstreamState::default(),
        life: Vec::new(),
        variables,
        evidence: Vec::new(),
    }
}

/// The embedded file with two invented fixes instead of the curated ones.
fn catalogue() -> MitigationCatalogue {
    let fixes = [
        fix(
            "graph-cache-cap",
            vec![
                variable("LLAMA_WARDEN_GRAPH_CACHE_CAP", VariableKind::Integer, Some(16)),
                variable("LLAMA_WARDEN_GRAPH_IDLE_TRIM_S", VariableKind::Integer, Some(30)),
            ],
        ),
        fix("report", vec![variable("LLAMA_WARDEN_REPORT", VariableKind::Path, None)]),
    ];
    let text = include_str!("../../mitigations.toml");
    MitigationCatalogue::assemble("m.toml", text, fixes.iter().map(|fix| ("cuda-memory", fix))).unwrap()
}

fn resolve(list: &[&str]) -> MitigationResolution {
    catalogue().resolve(&list.iter().map(|&item| item.to_owned()).collect::<Vec<_>>())
}

/// The only finding as text.
fn told(list: &[&str]) -> String {
    let findings = resolve(list).findings;
    assert_eq!(findings.len(), 1, "{findings:?}");
    let level = if findings[0].error { "error" } else { "warning" };
    let hint = findings[0].hint.clone().unwrap_or_default();
    format!("{level} at {}: {} | {hint}", findings[0].item, findings[0].message)
}

#[test]
fn the_shipped_list_is_sound_and_every_cure_is_in_it() {
    let all = MitigationCatalogue::embedded().unwrap();
    for leak in all.leaks() {
        for id in leak.cures.iter().filter_map(|cure| cure.mitigation.as_ref()) {
            assert!(all.mitigation(id).is_some(), "leak {}: its cure {id} is nowhere", leak.id);
        }
        assert!(leak.symptom.ends_with('.') && !leak.confidence.is_empty(), "leak {}", leak.id);
    }
    for id in all.pairs.iter().flat_map(|pair| &pair.ids) {
        assert!(all.mitigation(id).is_some(), "a pair names {id}, which is nowhere");
    }
    for entry in all.mitigations() {
        assert!(
            !entry.title.is_empty() && !entry.cost.is_empty() && !entry.symptoms.is_empty(),
            "{}",
            entry.id
        );
        let mut parts: Vec<&str> = entry.parts.iter().map(|part| part.name.as_str()).collect();
        parts.sort_unstable();
        parts.dedup();
        assert_eq!(parts.len(), entry.parts.len(), "{}: two parts have one name", entry.id);
    }
}

/// Reports upstream, each with the entry that describes it, something that helps, and what is known or not
/// known of its cause.
const REPORTS: [(u32, &str, &str, &str); 14] = [
    (22_404, "tensor-split-context", "upgrade to b9320", "Fixed in b9320"),
    (27_845, "tensor-split-host-open", "--split-mode layer", "cause unknown"),
    (27_155, "draft-host-open", "run without the draft", "cause unknown"),
    (21_742, "tensor-split-vram-open", "no-cuda-graphs", "Whether the graphs were the cause is not known"),
    (25_437, "checkpoints-kept", "upgrade to b10011", "Fixed in b10011"),
    (21_690, "ctx-checkpoints-growth", "ctx-checkpoints", "a bound in bytes and is open"),
    (29_142, "vmm-reservation", "build-no-vmm", "Open (#29142)"),
    (23_094, "vmm-reservation", "build-no-vmm", "closed as stale"),
    (27_388, "decode-wedge", "restart", "the cause is not known"),
    (27_148, "prompt-cache-contamination", "cache_prompt = false", "Open (#27148)"),
    (27_422, "prompt-cache-contamination", "no-cache-idle-slots", "#27422 and #27579 were not"),
    (27_579, "prompt-cache-contamination", "for each group of users", "#27422 and #27579 were not"),
    (23_606, "recurrent-state-nan", "restart", "the reports name several causes"),
    (23_577, "recurrent-state-nan", "policy.max_age", "#23577 is open"),
];

#[test]
fn a_report_upstream_has_an_entry_with_builds_with_what_helps_and_with_what_is_not_known() {
    let all = MitigationCatalogue::embedded().unwrap();
    for (number, id, helps, cause) in REPORTS {
        let leak = all.leak(id).unwrap_or_else(|| panic!("{number}: there is no entry {id}"));
        assert!(leak.references.contains(&format!("ggml-org/llama.cpp#{number}")), "{id} lacks {number}");
        assert!(!leak.builds().is_empty() || !leak.range.is_empty(), "{id} names no builds");
        let cures: Vec<String> = leak.cures.iter().map(ToString::to_string).collect();
        assert!(cures.iter().any(|cure| cure.contains(helps)), "{number}: {helps:?} is not in {cures:?}");
        let told = format!("{} {} {}", leak.upstream, leak.title, leak.confidence);
        assert!(told.contains(cause), "{number}: {cause:?} is not in {told:?}");
    }
    assert_eq!(
        all.mitigation("build-no-vmm").unwrap().how(),
        "a build with -DGGML_CUDA_NO_VMM=ON",
        "it takes another build to do without the reservation"
    );
    // It names the systems that refuse the reservation.
    let systems = &all.leak("vmm-reservation").unwrap().symptom;
    assert!(["Jetson", "WSL 2"].iter().all(|system| systems.contains(system)), "{systems}");
}

#[test]
fn each_kind_of_mitigation_comes_to_what_it_says() {
    let done = resolve(&[
        "graph-cache-cap=64",
        "graph-cache-cap.idle-trim=7",
        "no-pinned-memory",
        "malloc-arenas",
        "no-concurrent-streams",
        "cache-ram=512",
        "kv-f16",
        "build-one-copy",
        "report",
    ]);
    assert_eq!(done.findings, []);
    let set: Vec<(&str, &str)> =
        done.effects.iter().flat_map(|one| &one.set).map(|(a, b)| (&**a, &**b)).collect();
    assert_eq!(
        set,
        [
            ("LLAMA_WARDEN_GRAPH_CACHE_CAP", "64"),
            ("LLAMA_WARDEN_GRAPH_IDLE_TRIM_S", "7"),
            ("GGML_CUDA_NO_PINNED", "1"),
            ("MALLOC_ARENA_MAX", "2"),
        ]
    );
    assert_eq!(done.effects[4].unset, ["GGML_CUDA_GRAPH_OPT"]);
    let words: Vec<&str> =
        done.effects.iter().flat_map(|one| &one.flags).flat_map(|flag| &flag.words).map(|w| &**w).collect();
    assert_eq!(words, ["--cache-ram", "512", "--cache-type-k", "f16", "--cache-type-v", "f16"]);
    let option = BuildNeed::Option { name: "GGML_SCHED_MAX_COPIES".into(), value: "1".into() };
    assert_eq!(done.effects[7].need, Some(option));
    assert!(
        done.effects[8].set.is_empty() && done.effects[8].need.is_some(),
        "each process has a report of its own"
    );
    let set = |list: &[&str]| resolve(list).effects.into_iter().flat_map(|one| one.set).collect::<Vec<_>>();
    let pair = |name: &str, value: &str| (format!("LLAMA_WARDEN_GRAPH_{name}"), value.to_owned());
    let both = [pair("CACHE_CAP", "16"), pair("IDLE_TRIM_S", "30")];
    assert_eq!(set(&["graph-cache-cap"]), both, "a fix that is switched on has all its defaults");
    assert_eq!(set(&["graph-cache-cap=5", "graph-cache-cap.idle-trim=off"]), [pair("CACHE_CAP", "5")]);
}

#[test]
fn what_is_wrong_with_an_item_names_the_range_the_unit_and_the_nearest() {
    assert_eq!(
        told(&["graph-cache-cup=4"]),
        "error at 0: there is no mitigation `graph-cache-cup` | the nearest is `graph-cache-cap`; \
         `llama-warden mitigations list` shows all; a fix of your own comes with its set's folder in \
         `paths.patches`, or with a build that has it"
    );
    assert_eq!(
        told(&["cuda-graph-window"]),
        "error at 0: `cuda-graph-window` is a leak, not a mitigation | what helps against it: graph-cache-cap, \
         no-cuda-graphs, build-no-cuda-graphs, build-no-hip-graphs"
    );
    assert_eq!(
        told(&["vmm-reservation"]),
        "error at 0: `vmm-reservation` is a defect, not a mitigation | what helps against it: build-no-vmm"
    );
    let range = "a whole number from 1 to 1000 (graphs)";
    assert_eq!(
        told(&["graph-cache-cap=0"]),
        format!("error at 0: `graph-cache-cap`: `0` is out of range: it is {range} | ")
    );
    assert_eq!(
        told(&["graph-cache-cap=many"]),
        format!("error at 0: `graph-cache-cap`: `many` is not {range} | ")
    );
    assert_eq!(
        told(&["cache-ram"]),
        "error at 0: `cache-ram` needs a value: `cache-ram=VALUE`, where VALUE is a whole number from 0 to 16777216 \
         (MiB) | "
    );
    assert_eq!(told(&["no-cuda-graphs=1"]), "error at 0: `no-cuda-graphs` takes no value | ");
    assert_eq!(
        told(&["split-mode=layer"]),
        "error at 0: `split-mode`: `layer` is not one of `none`, `row`, `tensor` | "
    );
    assert_eq!(
        told(&["graph-cache-cap", "graph-cache-cap.trim=1"]),
        "error at 1: `graph-cache-cap` has no part `trim` | there is `graph-cache-cap.idle-trim`"
    );
    assert_eq!(told(&["no-mmap.x"]), "error at 0: `no-mmap` has no part `x` | it has no parts");
}

#[test]
fn twice_contradicting_and_pointless_are_told_apart() {
    assert_eq!(
        told(&["no-mmap", "cache-ram=1", "cache-ram=2"]),
        "error at 2: `cache-ram` is given twice | keep one of them"
    );
    assert_eq!(
        told(&["graph-cache-cap", "no-cuda-graphs"]),
        "warning at 1: `no-cuda-graphs` and `graph-cache-cap`: without graphs there is no graph cache: the cap has \
         nothing to do | keep one of them"
    );
    assert_eq!(
        told(&["graph-cache-cap.idle-trim=5"]),
        "warning at 0: `graph-cache-cap.idle-trim` is given without `graph-cache-cap`, which stays off | add \
         `graph-cache-cap` to the list, if it was meant"
    );
    let text = "schema = 1\n\
        [[mitigation]]\nid = \"a\"\ntitle = \"a\"\ntext = \"\"\ncost = \"\"\nconfidence = \"\"\nreferences = []\nunset = { names = [\"X\"] }\n\
        [[mitigation]]\nid = \"b\"\ntitle = \"b\"\ntext = \"\"\ncost = \"\"\nconfidence = \"\"\nreferences = []\nset = { name = \"X\", value = \"1\" }\n";
    let two = MitigationCatalogue::assemble("m.toml", text, std::iter::empty()).unwrap();
    for list in [["a", "b"], ["b", "a"]] {
        let done = two.resolve(&list.map(str::to_owned));
        assert_eq!(done.findings.len(), 1);
        let message = format!("`{}` and `{}` contradict each other: both decide about X", list[0], list[1]);
        assert_eq!((done.findings[0].error, &done.findings[0].message), (true, &message));
    }
}

#[test]
fn a_broken_file_names_file_line_and_entry() {
    let broken = |text: &str| {
        MitigationCatalogue::assemble("m.toml", &format!("schema = 1\n{text}"), std::iter::empty())
            .unwrap_err()
            .to_string()
    };
    let entry = "[[mitigation]]\nid = \"a\"\ntitle = \"a\"\ntext = \"\"\ncost = \"\"\nconfidence = \"\"\nreferences = []\n";
    assert!(broken("[[mitigation]]\nname = 1\n").starts_with("m.toml:3: unknown field `name`"));
    let error = broken(entry);
    assert_eq!(error, "m.toml:2: `mitigation `a``: it has exactly one of `set`, `unset`, `flags`, `option`");
    let set = format!("{entry}set = {{ name = \"X\" }}\n");
    assert!(broken(&set).contains("one of them"), "neither a fixed nor a given value");
    let leak = "[[leak]]\nid = \"l\"\ntitle = \"\"\nkind = \"leak\"\nmemory = []\nsymptom = \"\"\nreferences = []\nconfidence = \"\"\n";
    assert!(
        broken(&format!("{leak}cures = [{{ restart = true, upgrade = \"b1\" }}]")).contains("exactly one of")
    );
    let wedge = leak.replace("kind = \"leak\"", "kind = \"defect\"");
    assert!(
        broken(&format!("{wedge}cures = []\nsigns = [{{ grows = [\"host\"], confidence = 0.5 }}]"))
            .contains("a `defect` does not grow"),
        "growth would be put down to it"
    );
    assert!(
        broken(&format!("{leak}cures = []\nfirst = \"b20\"\nlast = \"b10\""))
            .contains("b10 comes before b20")
    );
    let twice = format!("{entry}unset = {{ names = [\"X\"] }}\n{entry}unset = {{ names = [\"X\"] }}\n");
    assert_eq!(broken(&twice), "m.toml: `id `a``: is given twice");
}

fn build(provenance: Option<ProvenanceFacts>, content: &str) -> (tempfile::TempDir, BuildFacts) {
    let dir = tempfile::tempdir().unwrap();
    let binary = dir.path().join("llama-server");
    std::fs::write(&binary, content).unwrap();
    (dir, BuildFacts { binary, number: Some(8827), provenance })
}

fn provenance(backend: &str, fixes: Option<&[&str]>) -> ProvenanceFacts {
    ProvenanceFacts {
        own: Vec::new(),
        fix_states: Vec::new(),
        id: "1234".to_owned(),
        backend: backend.to_owned(),
        fixes: fixes.map(|all| all.iter().map(|&fix| fix.to_owned()).collect()),
        options: vec![
            ("GGML_CUDA_GRAPHS".to_owned(), "ON".to_owned()),
            ("GGML_CUDA_GRAPHS".to_owned(), "0".to_owned()),
        ],
    }
}

fn fit(item: &str, build: &BuildFacts) -> MitigationFit {
    resolve(&[item]).effects[0].fit(build)
}

#[test]
fn a_build_without_the_fix_is_told_with_the_command_that_makes_one() {
    let (_dir, plain) = build(Some(provenance("cuda", Some(&[]))), "nothing");
    let MitigationFit::Missing { message, hint } = fit("graph-cache-cap", &plain) else { panic!() };
    assert_eq!(
        message,
        "mitigation graph-cache-cap needs a llama-server built with the patch set cuda-memory; build 1234 has none"
    );
    assert!(hint.starts_with("run `llama-warden build`"), "{hint}");
    let (_dir, other) = build(Some(provenance("cuda", Some(&["report"]))), "nothing");
    let MitigationFit::Missing { message, .. } = fit("graph-cache-cap", &other) else { panic!() };
    assert!(message.ends_with("and its fix graph-cache-cap; build 1234 has report"), "{message}");
    let (_dir, with) = build(Some(provenance("cuda", Some(&["graph-cache-cap"]))), "nothing");
    assert_eq!(fit("graph-cache-cap", &with), MitigationFit::Fits);
    let (_dir, silent) = build(Some(provenance("cuda", None)), "..llama-warden fix graph-cache-cap..");
    assert_eq!(
        fit("graph-cache-cap", &silent),
        MitigationFit::Fits,
        "the binary says what the provenance do not"
    );
}

#[test]
fn a_binary_of_somebody_else_is_searched_for_the_fix() {
    let (_dir, plain) = build(None, "\u{7f}ELF nothing");
    let MitigationFit::Missing { message, .. } = fit("graph-cache-cap", &plain) else { panic!() };
    assert!(message.contains("the text `llama-warden fix graph-cache-cap` is neither in /"), "{message}");
    let (_dir, with) = build(None, "\u{7f}ELF llama-warden fix graph-cache-cap");
    assert_eq!(fit("graph-cache-cap", &with), MitigationFit::Fits);
    let (_dir, script) = build(None, "#!/bin/sh\nexec x\n");
    assert!(
        matches!(fit("graph-cache-cap", &script), MitigationFit::Note(note) if note.contains("is a script"))
    );
    assert!(
        matches!(fit("build-one-copy", &plain), MitigationFit::Note(note) if note.ends_with("cannot be told"))
    );
}

#[test]
fn options_backends_and_numbers_of_a_build_are_judged() {
    let (_dir, cuda) = build(Some(provenance("cuda", None)), "");
    assert_eq!(
        fit("build-no-cuda-graphs", &cuda),
        MitigationFit::Fits,
        "the last of a repeated option counts, 0 is OFF"
    );
    let MitigationFit::Missing { message, hint } = fit("build-one-copy", &cuda) else { panic!() };
    assert_eq!(
        message,
        "mitigation build-one-copy needs a llama-server built with -DGGML_SCHED_MAX_COPIES=1; build 1234 was built \
         without it"
    );
    assert_eq!(hint, "run `llama-warden build -DGGML_SCHED_MAX_COPIES=1`");
    let MitigationFit::Missing { hint, .. } = fit("build-no-vmm", &cuda) else { panic!() };
    assert_eq!(hint, "run `llama-warden build -DGGML_CUDA_NO_VMM=ON`");
    let (_dir, cpu) = build(Some(provenance("cpu", Some(&[]))), "");
    assert_eq!(
        fit("graph-cache-cap", &cpu),
        MitigationFit::LeftOut(
            "mitigation graph-cache-cap is for cuda, hip, and build 1234 computes on cpu: it is left out"
                .to_owned()
        )
    );
    assert_eq!(fit("cache-ram=1", &cpu), MitigationFit::Fits);
    let early = fit("checkpoint-min-step=1", &cuda);
    assert!(
        matches!(&early, MitigationFit::Note(note) if note.contains("from b9310 on") && note.contains("may refuse to start"))
    );
    let (_dir, mut late) = build(Some(provenance("cuda", None)), "");
    late.number = Some(10528);
    assert!(
        matches!(fit("cublas-workspace=:16:8", &late), MitigationFit::Note(note) if note.contains("up to b10527"))
    );
}

#[test]
fn a_choice_that_ends_the_process_of_a_build_is_refused_there_and_nowhere_else() {
    let of = |backend: Option<&str>, number| {
        let (dir, build) = build(backend.map(|backend| provenance(backend, None)), "");
        (dir, BuildFacts { number: Some(number), ..build })
    };
    let (_dir, cuda) = of(Some("cuda"), 9890);
    let MitigationFit::Missing { message, .. } = fit("split-mode=row", &cuda) else {
        panic!("it ends the process")
    };
    assert!(
        message.contains("`row` is for builds to b9889, and build 1234 is b9890: the GPU backend ends"),
        "{message}"
    );
    assert_eq!(fit("split-mode=none", &cuda), MitigationFit::Fits);
    assert_eq!(fit("split-mode=row", &of(Some("cuda"), 9889).1), MitigationFit::Fits);
    assert_eq!(fit("split-mode=row", &of(Some("vulkan"), 9890).1), MitigationFit::Fits);
    // Forks count differently.
    let foreign = of(None, 9890);
    assert!(
        matches!(fit("split-mode=row", &foreign.1), MitigationFit::Note(note) if note.ends_with("where it computes on cuda or hip"))
    );
    // The user's own arguments count, too.
    let args = ["-sm", "row", "-sm", "none"].map(str::to_owned);
    let refused = catalogue().refused_values(&args, &cuda);
    assert!(
        matches!(refused.as_slice(), [(1, why)] if why.starts_with("`-sm row`: `row` is for builds to b9889")),
        "{refused:?}"
    );
}

#[test]
fn what_may_start_a_server_is_in_the_list_with_a_value_and_is_no_build_option() {
    let all = MitigationCatalogue::embedded().unwrap();
    let done = all.resolve(all.start_items());
    assert_eq!(done.findings, []);
    assert!(done.effects.len() > 5 && done.effects.iter().all(|one| one.need.is_none()));
    assert!(done.effects.iter().all(|one| one.flags.len() + one.set.len() == 1), "one switch each");
}

/// The effect of other spellings of a switch is tested in tests/it/sidecar.rs.
#[test]
fn the_text_of_a_switch_names_the_words_that_its_code_takes() {
    let all = crate::SetCatalogue::embedded().unwrap();
    let fixes = all.sets().iter().flat_map(|set| &set.fixes);
    let is_switch = |variable: &&FixVariable| matches!(variable.kind, VariableKind::Flag);
    let texts: Vec<&str> =
        fixes.flat_map(|fix| fix.variables.iter().filter(is_switch).map(|one| one.text.as_str())).collect();
    assert!(!texts.is_empty());
    for text in texts {
        assert!(text.contains('1') && text.contains('0') && !text.contains("anything but"), "{text}");
    }
}

#[test]
fn fixes_of_ones_own_sets_are_named_with_their_variables_and_never_take_another_name() {
    let path =
        FixVariable { default: None, unit: String::new(), ..variable("MINE_FILE", VariableKind::Path, None) };
    let own = fix("count-turns", vec![variable("MINE_LIMIT", VariableKind::Integer, Some(32)), path]);
    let list = catalogue().with_own([("mine", &own)], "/sets/mine").unwrap();
    // The first definition counts: that of the build precedes that of a folder.
    let other = SetFix { title: "newer".into(), ..own.clone() };
    let list = list.with_own([("mine", &other)], "/elsewhere").unwrap();
    let entry = list.mitigation("count-turns").unwrap();
    assert_eq!((entry.title.as_str(), entry.own.as_deref()), ("a cap", Some("/sets/mine")));
    let done = list.resolve(&["count-turns=7".to_owned(), "count-turns.mine-file=/x/y".to_owned()]);
    assert_eq!(done.findings, []);
    let set: Vec<_> = done.effects.iter().flat_map(|one| &one.set).cloned().collect();
    assert_eq!(set, [("MINE_LIMIT".into(), "7".into()), ("MINE_FILE".to_owned(), "/x/y".to_owned())]);
    let near = list.resolve(&["count-turn".to_owned()]).findings.remove(0);
    assert!(near.hint.unwrap().starts_with("the nearest is `count-turns`"));
    for taken in ["graph-cache-cap", "no-cuda-graphs", "cuda-graph-window", "count-turns"] {
        let wrong = fix(taken, Vec::new());
        let error = list.clone().with_own([("other", &wrong)], "/x").unwrap_err().to_string();
        assert!(error.contains("the name is taken by") && error.contains(taken), "{error}");
    }
    // The build lacks the fix; the remedy is the user's own folder.
    let (_dir, build) = build(Some(provenance("cuda", Some(&["graph-cache-cap"]))), "");
    let MitigationFit::Missing { message, hint } = done.effects[0].fit(&build) else {
        panic!("it is not there")
    };
    assert!(message.contains("patch set mine") && hint.contains("paths.patches"), "{message} {hint}");
}
