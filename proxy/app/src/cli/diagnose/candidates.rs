//! Selects and orders the mitigations to try on a server whose memory grows or that crashes. Gives the reason
//! for each skipped mitigation.

use std::collections::BTreeMap;

use warden_config::advice::AdvisedServer;
use warden_config::resolve::ResolvedConfig;
use warden_config::resolve::binary::AlternativeCommand;
use warden_config::resolve::mitigations::{MitigationChecker, ModelMitigations, catalogue};
use warden_diagnose::report::{TrialSwitch, UntriedSwitch};
use warden_experiment::LegFinding;
use warden_patches::mitigation::{
    LeakAdvice, LeakMemory, MitigationAction, MitigationCatalogue, MitigationEntry, ServerObservations,
};
use warden_patches::set::life::LifeState;
use warden_policies::MemoryKind;
use warden_policies::growth::GrowthBlame;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SearchPurpose {
    Growth,
    Crash {
        /// The last log lines of the server mention GPU code.
        on_gpu: bool,
    },
}

#[derive(Debug, Default)]
pub(super) struct SwitchCandidates {
    /// Cheapest and most promising first.
    pub(super) switches: Vec<TrialSwitch>,
    pub(super) not_tried: Vec<UntriedSwitch>,
    /// Pairs that conflict, or in which one mitigation makes the other useless.
    pub(super) clashes: Vec<[usize; 2]>,
}

pub(super) fn leak_evidence(findings: &[&LegFinding], server: &AdvisedServer) -> ServerObservations {
    let mut seen = ServerObservations {
        build: server.build,
        backend: server.backend.clone(),
        args: server.args.clone(),
        variables: server.all_variables(),
        mitigations: server.mitigations.clone(),
        images: findings.iter().any(|finding| finding.work.images > 0 && finding.leaks()),
        ..ServerObservations::default()
    };
    let all = || findings.iter().flat_map(|finding| &finding.series);
    for found in all().filter(|found| found.verdict.grows()) {
        let memory = memory_of(found.series);
        if !seen.growing.contains(&memory) {
            seen.growing.push(memory);
        }
        if let Some(GrowthBlame::Pays { unit, .. }) = &found.blame {
            seen.unit.get_or_insert_with(|| unit.as_str().to_owned());
        }
    }
    for memory in all().map(|found| memory_of(found.series)) {
        if !seen.growing.contains(&memory) && !seen.stable.contains(&memory) {
            seen.stable.push(memory);
        }
    }
    seen
}

fn memory_of(series: MemoryKind) -> LeakMemory {
    if series == MemoryKind::Host { LeakMemory::Host } else { LeakMemory::Vram }
}

pub(super) fn find_candidates(
    resolved: &ResolvedConfig,
    model: usize,
    seen: &ServerObservations,
    purpose: SearchPurpose,
    judge: &mut MitigationChecker,
) -> Result<SwitchCandidates, String> {
    let own = resolved.models.get(model).map(|own| &own.mitigations);
    let list = own.map_or_else(catalogue, ModelMitigations::available)?;
    let list = list.as_ref();
    let advice = list.advise(seen);
    let values = &warden_policies::defaults().diagnose.cure.values;
    let configured = own.map(|own| own.list().to_vec()).unwrap_or_default();
    let mut found = SwitchCandidates::default();
    let mut commands: Vec<AlternativeCommand> = Vec::new();
    let mut all = order_by_advice(list, &advice);
    if purpose == (SearchPurpose::Crash { on_gpu: true }) {
        // A stable sort keeps the order among the GPU entries and among the others.
        all.sort_by_key(|(entry, _)| entry.backends.is_empty() && !entry.memory.contains(&LeakMemory::Vram));
    }
    for (entry, against) in all {
        let tried = check_suits_build(resolved, model, entry)
            .and_then(|()| check_relevance(list, entry, seen, against, purpose))
            .and_then(|()| mitigation_item(entry, values))
            .and_then(|item| {
                let own = with_mitigations(resolved, model, &configured, &[&item], judge)?;
                Ok((item, check_changes_command(resolved, model, own)?))
            });
        match tried {
            Ok((item, own)) => {
                let does = own.descriptions.last().cloned().unwrap_or_default();
                let does = does.split_once(": ").map_or(does.clone(), |(_, rest)| rest.to_owned());
                let against = against.map(|advice| advice.title.clone());
                found.switches.push(TrialSwitch { item, title: entry.title.clone(), does, against });
                commands.push(own);
            }
            Err(why) => found.not_tried.push(UntriedSwitch { item: entry.id.clone(), why }),
        }
    }
    for one in 0..found.switches.len() {
        for other in one + 1..found.switches.len() {
            let pair = [found.switches[one].item.as_str(), found.switches[other].item.as_str()];
            let both = with_mitigations(resolved, model, &configured, &pair, judge);
            let alone = commands[one].notes.len() + commands[other].notes.len();
            if both.is_err() || both.is_ok_and(|both| both.notes.len() > alone) {
                found.clashes.push([one, other]);
            }
        }
    }
    Ok(found)
}

pub(super) fn with_mitigations(
    resolved: &ResolvedConfig,
    model: usize,
    configured: &[String],
    items: &[&str],
    judge: &mut MitigationChecker,
) -> Result<AlternativeCommand, String> {
    let mut list = configured.to_vec();
    list.extend(items.iter().map(|item| (*item).to_owned()));
    resolved.alternative(model, &list, judge)
}

/// Orders the advised mitigations first, each with its advice, then the others.
fn order_by_advice<'a>(
    list: &'a MitigationCatalogue,
    advice: &'a [LeakAdvice],
) -> Vec<(&'a MitigationEntry, Option<&'a LeakAdvice>)> {
    let mut all: Vec<(&MitigationEntry, Option<&LeakAdvice>)> = Vec::new();
    for advice in advice {
        for id in &advice.mitigations {
            let known = all.iter().any(|(entry, _)| entry.id == *id);
            if let Some(entry) = list.mitigation(id).filter(|_| !known) {
                all.push((entry, Some(advice)));
            }
        }
    }
    for entry in list.mitigations() {
        if !all.iter().any(|(known, _)| known.id == entry.id) {
            all.push((entry, None));
        }
    }
    all
}

/// Fails for a mitigation that this build does not need or that does harm in this build.
fn check_suits_build(resolved: &ResolvedConfig, model: usize, entry: &MitigationEntry) -> Result<(), String> {
    let build = resolved.models.get(model).and_then(|own| own.build.as_ref());
    match build.and_then(|build| build.mitigation_state(entry)) {
        Some(life) if life.is != LifeState::Needed => {
            Err(format!("it is {} in this build: {}", life.is.name(), life.reason()))
        }
        _ => Ok(()),
    }
}

fn check_relevance(
    list: &MitigationCatalogue,
    entry: &MitigationEntry,
    seen: &ServerObservations,
    against: Option<&LeakAdvice>,
    purpose: SearchPurpose,
) -> Result<(), String> {
    if seen.mitigations.contains(&entry.id) {
        return Err("it is in `mitigations` already".to_owned());
    }
    // The cause of a crash is unknown beforehand, so every mitigation may help.
    if against.is_some() || matches!(purpose, SearchPurpose::Crash { .. }) {
        return Ok(());
    }
    let grows = |leak: &String| list.leak(leak).is_some_and(|leak| leak.kind.grows());
    // For a fix of the user's own patch set, only the kind of memory is known.
    let own = entry.own.is_some() && !entry.memory.is_empty();
    if !own && !entry.cures.iter().any(grows) {
        return Err("it is not about memory that grows".to_owned());
    }
    if !entry.memory.iter().any(|memory| seen.growing.contains(memory)) {
        let about: Vec<&str> = entry.memory.iter().map(|memory| memory_name(*memory)).collect();
        return Err(format!("it is about memory of the {}, which does not grow here", about.join(" and ")));
    }
    let gpu = seen.growing.contains(&LeakMemory::Vram) || seen.stable.contains(&LeakMemory::Vram);
    if !entry.backends.is_empty() && !gpu {
        return Err(format!(
            "it is for {}, and the server holds no memory of a GPU that can be read",
            entry.backends.join(", ")
        ));
    }
    Ok(())
}

fn mitigation_item(entry: &MitigationEntry, values: &BTreeMap<String, String>) -> Result<String, String> {
    if let MitigationAction::BuildOption { name, setting } = &entry.action {
        return Err(format!("it needs another build, with -D{name}={setting}"));
    }
    match &entry.value {
        Some(value) if value.default.is_none() => match values.get(&entry.id) {
            Some(value) => Ok(format!("{}={value}", entry.id)),
            None => Err(format!("it needs a value that cannot be guessed: try `{}` by hand", entry.usage())),
        },
        _ => Ok(entry.id.clone()),
    }
}

/// Fails for an alternative that leaves the command unchanged.
fn check_changes_command(
    resolved: &ResolvedConfig,
    model: usize,
    own: AlternativeCommand,
) -> Result<AlternativeCommand, String> {
    let same = resolved.fleet.models.get(model).is_some_and(|spec| spec.command == own.command);
    match (same, own.notes.last()) {
        (false, _) => Ok(own),
        (true, Some(note)) => Err(note.clone()),
        (true, None) => Err("it changes nothing: the server runs so already".to_owned()),
    }
}

const fn memory_name(memory: LeakMemory) -> &'static str {
    match memory {
        LeakMemory::Host => "host",
        LeakMemory::Vram => "GPU",
        LeakMemory::Kernel => "kernel",
    }
}
