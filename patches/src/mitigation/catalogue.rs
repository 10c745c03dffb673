//! The catalogue of mitigations and leaks.

use std::sync::Arc;

use super::entry::{LeakMemory, MitigationAction, MitigationEntry, MitigationPart};
use super::leak::KnownLeak;
use super::load::{self, RedundantPair};
use super::value::ValueSpec;
use crate::embedded::embedded_file;
use crate::error::{PatchError, Result};
use crate::set::{self, FixVariable, SetFix, VariableKind};

/// All mitigations and leaks. Ids are unique over both.
#[derive(Clone, Debug)]
pub struct MitigationCatalogue {
    mitigations: Vec<Arc<MitigationEntry>>,
    leaks: Vec<KnownLeak>,
    pub(super) pairs: Vec<RedundantPair>,
    start: Vec<String>,
}

impl MitigationCatalogue {
    /// The curated catalogue: the fixes of the curated patch sets, and mitigations without a patch.
    ///
    /// # Errors
    /// Fails if an embedded file is invalid, which this crate's tests exclude.
    pub fn embedded() -> Result<Self> {
        let patches = set::SetCatalogue::embedded()?;
        let text = embedded_file("mitigations.toml").and_then(|bytes| std::str::from_utf8(bytes).ok());
        let fixes = patches.sets().iter().flat_map(|set| set.fixes.iter().map(|fix| (set.id.as_str(), fix)));
        Self::assemble(load::MITIGATIONS_FILE, text.unwrap_or_default(), fixes)
    }

    pub(super) fn assemble<'a>(
        file: &str,
        text: &str,
        fixes: impl Iterator<Item = (&'a str, &'a SetFix)>,
    ) -> Result<Self> {
        let loaded = load::load_mitigations(file, text)?;
        let mut all: Vec<MitigationEntry> =
            fixes.map(|(set, fix)| mitigation_from_fix(set, fix, None)).collect();
        all.extend(loaded.mitigations);
        for leak in &loaded.leaks {
            for one in leak.cures.iter().filter_map(|cure| cure.mitigation.as_ref()) {
                // A program with other embedded patch sets may lack the mitigation.
                let Some(found) = all.iter_mut().find(|entry| entry.id == *one) else { continue };
                found.cures.push(leak.id.clone());
                if matches!(found.action, MitigationAction::Patch { .. }) {
                    let new = leak.memory.iter().filter(|memory| !found.memory.contains(memory));
                    let new: Vec<LeakMemory> = new.copied().collect();
                    found.memory.extend(new);
                } else {
                    found.symptoms.push(leak.symptom.clone());
                }
            }
        }
        let mut ids: Vec<&str> = all.iter().map(|entry| entry.id.as_str()).collect();
        ids.extend(loaded.leaks.iter().map(|leak| leak.id.as_str()));
        ids.sort_unstable();
        if let Some((twice, _)) = ids.iter().zip(ids.iter().skip(1)).find(|(one, next)| one == next) {
            return Err(PatchError::set(file, format!("id `{twice}`"), "is given twice"));
        }
        Ok(Self {
            mitigations: all.into_iter().map(Arc::new).collect(),
            leaks: loaded.leaks,
            pairs: loaded.pairs,
            start: loaded.start,
        })
    }

    /// Adds fixes of the user's own sets; `origin` names their files for messages. Skips a fix that the
    /// user's sets already added.
    ///
    /// # Errors
    /// Fails if a fix has the id of a curated fix, a mitigation, a leak, or a fix of another set.
    pub fn with_own<'a>(
        mut self,
        fixes: impl IntoIterator<Item = (&'a str, &'a SetFix)>,
        origin: &str,
    ) -> Result<Self> {
        for (set, fix) in fixes {
            if let Some(taken) = self.mitigation(&fix.id) {
                if taken.own.is_some()
                    && matches!(&taken.action, MitigationAction::Patch { set: other, .. } if other == set)
                {
                    continue;
                }
                return Err(id_clash(set, &fix.id, origin, &taken.describe()));
            }
            if self.leak(&fix.id).is_some() {
                return Err(id_clash(set, &fix.id, origin, "a leak in the list of mitigations"));
            }
            self.mitigations.push(Arc::new(mitigation_from_fix(set, fix, Some(origin))));
        }
        Ok(self)
    }

    /// All mitigations, fixes of patch sets first.
    pub fn mitigations(&self) -> &[Arc<MitigationEntry>] {
        &self.mitigations
    }

    /// All leaks.
    pub fn leaks(&self) -> &[KnownLeak] {
        &self.leaks
    }

    /// Mitigations to try, in this order, for a server that crashes while loading.
    pub fn start_items(&self) -> &[String] {
        &self.start
    }

    /// The mitigation with this id.
    pub fn mitigation(&self, id: &str) -> Option<&Arc<MitigationEntry>> {
        self.mitigations.iter().find(|entry| entry.id == id)
    }

    /// The leak with this id.
    pub fn leak(&self, id: &str) -> Option<&KnownLeak> {
        self.leaks.iter().find(|leak| leak.id == id)
    }

    /// Returns the most similar id of a mitigation; with `leaks`, also of a leak.
    pub fn nearest(&self, text: &str, leaks: bool) -> Option<&str> {
        let leaks = self.leaks.iter().filter(|_| leaks).map(|leak| leak.id.as_str());
        let all = self.mitigations.iter().map(|entry| entry.id.as_str()).chain(leaks);
        all.map(|id| (strsim::jaro_winkler(text, id), id))
            .max_by(|a, b| a.0.total_cmp(&b.0))
            .map(|(_, id)| id)
    }
}

fn id_clash(set: &str, fix: &str, origin: &str, with: &str) -> PatchError {
    let why = format!("the name is taken by {with}: rename the fix");
    PatchError::set(origin, format!("{set}/{fix}"), why)
}

fn mitigation_from_fix(set: &str, fix: &SetFix, origin: Option<&str>) -> MitigationEntry {
    let first = fix.variables.first();
    // llama-warden itself chooses the files of a curated fix, one per process, so the user sets no path.
    let chosen = |variable: &FixVariable| origin.is_none() && variable.kind == VariableKind::Path;
    let own = first.filter(|variable| !chosen(variable));
    let parts = fix.variables.iter().skip(1).filter(|variable| !chosen(variable));
    let mut text = first.map(|variable| variable.text.clone()).unwrap_or_default();
    if first.is_some_and(chosen) {
        text.push_str(". llama-warden chooses the file, one for each process.");
    }
    MitigationEntry {
        id: fix.id.clone(),
        title: fix.title.clone(),
        text: text.trim().to_owned(),
        action: MitigationAction::Patch {
            set: set.to_owned(),
            variable: own.map(|variable| variable.name.clone()),
            marker: fix.marker.clone(),
        },
        value: own.and_then(ValueSpec::from_variable),
        parts: parts
            .map(|variable| MitigationPart {
                name: part_name(&fix.id, &variable.name),
                variable: variable.name.clone(),
                value: ValueSpec::from_variable(variable),
                text: variable.text.clone(),
            })
            .collect(),
        own: origin.map(str::to_owned),
        memory: fix.memory.clone(),
        backends: fix.affects.backends.clone(),
        first: fix.affects.first.clone(),
        last: fix.affects.last.clone(),
        cost: fix.cost.clone(),
        risk: fix.risk.clone(),
        confidence: String::new(),
        evidence: fix.evidence.clone(),
        references: fix.references.clone(),
        life: fix.life.clone(),
        upstream: Some(fix.upstream.clone()),
        cures: Vec::new(),
        symptoms: vec![fix.symptom.clone()],
    }
}

/// Name of a fix's additional variable after the dot: the variable's name without our prefix, the fix's own
/// words and the unit. `LLAMA_WARDEN_GRAPH_IDLE_TRIM_S` of `graph-cache-cap` is `idle-trim`.
fn part_name(fix: &str, variable: &str) -> String {
    let own: Vec<&str> = fix.split('-').collect();
    let bare = variable.strip_prefix("LLAMA_WARDEN_").unwrap_or(variable).to_lowercase();
    let mut words: Vec<&str> = bare.split('_').skip_while(|word| own.contains(word)).collect();
    if words.len() > 1 && words.last().is_some_and(|last| ["s", "ms", "mib", "kib", "bytes"].contains(last)) {
        words.pop();
    }
    if words.is_empty() { bare.replace('_', "-") } else { words.join("-") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_named_by_what_its_variable_says_beyond_the_fix() {
        assert_eq!(part_name("graph-cache-cap", "LLAMA_WARDEN_GRAPH_IDLE_TRIM_S"), "idle-trim");
        assert_eq!(part_name("pool-purge", "LLAMA_WARDEN_POOL_PURGE_INTERVAL_MS"), "interval");
        assert_eq!(part_name("cublas-reset", "LLAMA_WARDEN_CUBLAS_RESET_INTERVAL_S"), "interval");
        assert_eq!(part_name("memory-report", "LLAMA_WARDEN_REPORT"), "report");
    }
}
