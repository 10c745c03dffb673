//! Matches the growth of a server's memory and its command line with the list of known leaks, and gives
//! advice. A mitigation that is already in place is never advised.

use std::collections::BTreeMap;
use std::sync::Arc;

use warden_patches::mitigation::{BuildFacts, LeakAdvice, LeakMemory, ServerObservations};
use warden_patches::set::life::FixStanding;
use warden_policies::growth::{GrowthBlame, GrowthVerdict, SeriesGrowth};
use warden_policies::{MemoryKind, WorkDone};
use warden_supervisor::{FleetView, ModelSpec};

use crate::resolve::mitigations::{ModelMitigations, catalogue};

/// Maximum number of leaks to report; more do not help an operator.
const MAX_ADVICE: usize = 2;
const MIN_LIKELIHOOD: f64 = 0.2;

/// Facts about a model's server that advice depends on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AdvisedServer {
    /// True if the server is no llama-server, so that no known leak applies.
    pub is_other_program: bool,
    /// Command line without the binary.
    pub args: Vec<String>,
    /// Names of the variables in the model's configuration.
    pub variables: Vec<String>,
    /// Names of variables inherited from llama-warden; all models share this list.
    pub inherited: Arc<[String]>,
    /// Number of the llama.cpp build, if known.
    pub build: Option<u32>,
    /// Backend, if known.
    pub backend: Option<String>,
    /// Names of active mitigations.
    pub mitigations: Vec<String>,
    /// State of each fix in the source of the server's build: needed, superseded, or harmful.
    pub fix_states: Vec<(String, FixStanding)>,
    /// Active mitigations as displayed; a mitigation of a user's own patch set is shown with the set's name.
    pub displayed_mitigations: Vec<String>,
}

/// Servers by the name of their model.
pub type AdvisedServers = BTreeMap<String, AdvisedServer>;

impl AdvisedServer {
    /// Collects the facts from a resolved model. `inherited` are names of llama-warden's own variables.
    pub fn from_spec(
        spec: &ModelSpec,
        facts: Option<&BuildFacts>,
        mitigations: &ModelMitigations,
        inherited: &Arc<[String]>,
    ) -> Self {
        let command = &spec.command;
        let is_passed_on = |name: &&String| !command.env_remove.contains(name);
        let inherited = if inherited.iter().all(|name| is_passed_on(&name)) {
            Arc::clone(inherited)
        } else {
            inherited.iter().filter(is_passed_on).cloned().collect()
        };
        Self {
            is_other_program: !command.kind.is_llama_server(),
            args: command.args.clone(),
            variables: command.env.iter().map(|(name, _)| name.clone()).collect(),
            inherited,
            build: facts.and_then(|facts| facts.number),
            backend: facts
                .and_then(|facts| facts.provenance.as_ref())
                .map(|provenance| provenance.backend.clone()),
            mitigations: mitigations.ids(),
            fix_states: fix_states(facts),
            displayed_mitigations: mitigations.display_items(),
        }
    }

    /// Names of all variables of the process.
    pub fn all_variables(&self) -> Vec<String> {
        self.variables.iter().chain(self.inherited.iter()).cloned().collect()
    }
}

/// States of fixes in the source of a build.
pub fn fix_states(facts: Option<&BuildFacts>) -> Vec<(String, FixStanding)> {
    let provenance = facts.and_then(|facts| facts.provenance.as_ref());
    provenance.map(|provenance| provenance.fix_states.clone()).unwrap_or_default()
}

/// Returns the likeliest leaks for the memory of one process; empty if no memory seems to leak.
pub fn advise<'a>(
    server: Option<&AdvisedServer>,
    work: WorkDone,
    growth: impl Iterator<Item = &'a SeriesGrowth>,
) -> Vec<LeakAdvice> {
    let mut seen = ServerObservations { images: work.images > 0, ..ServerObservations::default() };
    for one in growth {
        let memory = if one.series == MemoryKind::Host { LeakMemory::Host } else { LeakMemory::Vram };
        match one.verdict {
            GrowthVerdict::Suspected | GrowthVerdict::Leaking => {
                seen.growing.push(memory);
                if let Some(GrowthBlame::Pays { unit, .. }) = &one.blame {
                    seen.unit.get_or_insert_with(|| unit.as_str().to_owned());
                }
            }
            GrowthVerdict::Steady | GrowthVerdict::Bounded => seen.stable.push(memory),
            GrowthVerdict::Warming => {}
        }
    }
    if seen.growing.is_empty() || server.is_some_and(|server| server.is_other_program) {
        return Vec::new();
    }
    if let Some(server) = server {
        seen.args.clone_from(&server.args);
        seen.variables = server.all_variables();
        seen.mitigations.clone_from(&server.mitigations);
        seen.build = server.build;
        seen.fix_states.clone_from(&server.fix_states);
        seen.backend.clone_from(&server.backend);
    }
    let Ok(list) = catalogue() else { return Vec::new() };
    let mut all = list.advise(&seen);
    all.retain(|advice| advice.confidence >= MIN_LIKELIHOOD);
    all.truncate(MAX_ADVICE);
    all
}

/// Returns advice for each model, based on its worst process. Models without advice are left out.
pub fn advise_fleet(servers: &AdvisedServers, view: &FleetView) -> BTreeMap<String, Vec<LeakAdvice>> {
    let mut all = BTreeMap::new();
    for model in &view.models {
        let name = model.name.as_str();
        let worst = model.backends.iter().max_by_key(|backend| {
            backend.memory.growth.iter().map(|growth| growth.verdict).max().unwrap_or_default()
        });
        let Some(worst) = worst else { continue };
        let advice = advise(servers.get(name), worst.work, worst.memory.growth.iter());
        if !advice.is_empty() {
            all.insert(name.to_owned(), advice);
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use warden_policies::GpuIndex;
    use warden_policies::growth::WorkUnit;

    fn growth(series: MemoryKind, verdict: GrowthVerdict, unit: Option<WorkUnit>) -> SeriesGrowth {
        SeriesGrowth {
            verdict,
            since_request: 1,
            blame: unit.map(|unit| GrowthBlame::Pays { unit, bytes_per_unit: 1.0, share: 1.0 }),
            ..SeriesGrowth::without_readings(series)
        }
    }

    #[test]
    fn growth_per_image_on_cuda_names_the_graph_cache_until_it_is_capped() {
        let all = [
            growth(MemoryKind::Host, GrowthVerdict::Leaking, Some(WorkUnit::Image)),
            growth(MemoryKind::Vram(GpuIndex(0)), GrowthVerdict::Leaking, None),
        ];
        let mut server = AdvisedServer {
            build: Some(10_587),
            backend: Some("cuda".to_owned()),
            ..AdvisedServer::default()
        };
        let told = advise(Some(&server), WorkDone::default(), all.iter());
        assert_eq!(told[0].leak, "cuda-graph-window", "{told:?}");
        assert!(told[0].mitigations.contains(&"graph-cache-cap".to_owned()) && told.len() <= MAX_ADVICE);
        // A fork whose source contains upstream's own limit gets no advice, whatever its build number.
        let life = warden_patches::set::life::LifeStatement {
            is: warden_patches::set::life::LifeState::Superseded,
            by: warden_patches::set::life::EvidenceKind::Source,
            text: "bounded by itself".to_owned(),
            first: String::new(),
            last: String::new(),
            holds: vec!["p".to_owned()],
            fails: Vec::new(),
            commit: "0a1b2c3d4".to_owned(),
            hardware: String::new(),
            build: String::new(),
        };
        let standing = FixStanding { is: life.is, by_source: true, because: vec![life] };
        server.fix_states = vec![("graph-cache-cap".to_owned(), standing)];
        let told = advise(Some(&server), WorkDone::default(), all.iter());
        assert!(!told[0].mitigations.contains(&"graph-cache-cap".to_owned()), "{told:?}");
        assert!(told[0].not_here[0].contains("superseded in this build: bounded by itself"), "{told:?}");
        server.fix_states.clear();
        server.mitigations = vec!["graph-cache-cap".to_owned()];
        let told = advise(Some(&server), WorkDone::default(), all.iter());
        assert!(told.iter().all(|advice| !advice.leak.starts_with("cuda-graph")), "{told:?}");
    }

    #[test]
    fn what_does_not_grow_needs_no_advice() {
        let all = [
            growth(MemoryKind::Host, GrowthVerdict::Bounded, None),
            growth(MemoryKind::Vram(GpuIndex(0)), GrowthVerdict::Warming, None),
        ];
        assert!(advise(None, WorkDone::default(), all.iter()).is_empty());
    }
}
