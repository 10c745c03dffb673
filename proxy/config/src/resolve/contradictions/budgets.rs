//! Rules about budgets: their order, the machine's memory, and the memory that a process is told to keep.

use warden_policies::units::MIB;
use warden_policies::{ByteSize, MemoryLimit};

use super::{ConfigSummary, ModelSummary, RuleFinding};
use crate::policy::BudgetPair;

impl ConfigSummary<'_> {
    /// Returns all budgets with owner and keys; the owner is empty for a budget that all backends share.
    fn budgets(&self) -> Vec<(String, Vec<&str>, &'static str, BudgetPair)> {
        let mut all = Vec::new();
        for one in &self.models {
            let path = vec!["models", one.name, "policy"];
            let whose = format!("model `{}`: ", one.name);
            all.push((whose.clone(), path.clone(), "host", one.model.policy.host));
            all.push((whose, path, "vram", one.model.policy.vram));
        }
        all.push((String::new(), vec!["shared"], "host", self.settings.shared.host));
        all.push((String::new(), vec!["shared"], "vram", self.settings.shared.vram));
        all
    }

    /// Returns all memory limits with owner and keys.
    fn limits(&self) -> Vec<(String, Vec<&str>, MemoryLimit)> {
        let mut all = Vec::new();
        for (whose, path, memory, budgets) in self.budgets() {
            for (key, limit) in [("soft", budgets.soft), ("hard", budgets.hard)] {
                if let Some(limit) = limit {
                    let keys = path.iter().copied().chain([memory, key]).collect();
                    all.push((whose.clone(), keys, limit));
                }
            }
        }
        all
    }
}

/// Finds hard budgets that are not above the soft budget. Percentages of a GPU's memory cannot be compared
/// with sizes here.
pub(super) fn hard_above_soft(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let wrong = |(whose, path, memory, budgets): (String, Vec<&str>, &str, BudgetPair)| {
        let wrong = budgets.order_error((memory == "host").then_some(whole.memory))?;
        let keys: Vec<&str> = path.into_iter().chain([memory, "hard"]).collect();
        let hint = format!("`{memory}.hard` has to be the larger of the two");
        Some(RuleFinding::new(&keys, format!("{whose}{wrong}"), hint).fatal())
    };
    whole.budgets().into_iter().filter_map(wrong).collect()
}

/// Finds budgets below 1 MiB, which are likely numbers without a unit; such numbers count as bytes.
pub(super) fn budgets_of_a_few_bytes(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let small = |(whose, keys, limit): (String, Vec<&str>, MemoryLimit)| {
        let bytes = limit.bytes().filter(|bytes| bytes.0 < MIB)?;
        let message = format!(
            "{whose}a budget of {bytes} is below what any process holds, so it is always passed; a number without a unit \
             is bytes"
        );
        let like = if bytes.0 < 1000 { bytes.0.max(1) } else { 12 };
        Some(RuleFinding::new(&keys, message, format!("write the unit, like `\"{like}GiB\"`")))
    };
    whole.limits().into_iter().filter_map(small).collect()
}

/// Finds budgets above the machine's memory, which can never be reached.
pub(super) fn budgets_above_the_machine(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let large = |(whose, keys, limit): (String, Vec<&str>, MemoryLimit)| {
        let bytes = limit.bytes().filter(|bytes| *bytes > whole.memory && keys.contains(&"host"))?;
        let message = format!(
            "{whose}the budget of {bytes} is above the memory that there is ({}), so it is never passed",
            whole.memory
        );
        Some(RuleFinding::new(&keys, message, "lower it, or write a share, like `\"80%\"`"))
    };
    whole.limits().into_iter().filter_map(large).collect()
}

/// Finds budgets below the limit of caches that fill by design: such a budget is exceeded without a leak.
pub(super) fn budgets_below_declared_memory(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let of_one = |one: &ModelSummary<'_>| {
        let host = one.model.policy.host;
        // `auto` accounts for declared caches.
        let known =
            |(key, limit): (&'static str, Option<MemoryLimit>)| Some((key, limit?.resolve(whole.memory)?));
        let (key, budget) = [("soft", host.soft), ("hard", host.hard)].into_iter().find_map(known)?;
        let bound = one.declared.cache_bound();
        if bound.is_some_and(|bound| bound < budget.0) {
            return None;
        }
        let bound =
            bound.map_or("has no bound".to_owned(), |bound| format!("may grow to {}", ByteSize(bound)));
        let (count, slots) = one.declared.checkpoints();
        let more = match count * slots {
            0 => String::new(),
            all => format!(
                "; up to {all} context checkpoints ({count} for each of {slots} slots) may come on top"
            ),
        };
        let message = format!("the budget of {budget} is below the prompt cache, which {bound}{more}");
        let hint = "lower the cache with `--cache-ram MIB` in `args`, or raise the budget";
        Some(one.finding(&["policy", "host", key], &message, hint))
    };
    whole.models.iter().filter_map(of_one).collect()
}

/// Finds shared budgets below the budget of a single process: the shared one is always exceeded first.
pub(super) fn shared_budgets_below_a_models(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let shared = &whole.settings.shared;
    let mut found = Vec::new();
    for one in &whole.models {
        let policy = &one.model.policy;
        for (memory, total, all, own) in [
            ("host", Some(whole.memory), shared.host, policy.host),
            // Compare percentages of a GPU's memory only with percentages.
            ("vram", None, shared.vram, policy.vram),
        ] {
            for (key, all, own) in [("soft", all.soft, own.soft), ("hard", all.hard, own.hard)] {
                let Some((all, own)) = all.zip(own) else { continue };
                if !is_below(all, own, total) {
                    continue;
                }
                let message = format!(
                    "`policy.{memory}.{key}` is {own}, and `shared.{memory}.{key}`, over all processes, is {all}: that is passed first"
                );
                let hint =
                    format!("raise `shared.{memory}.{key}` to {own} or more, or lower the model's own");
                found.push(one.finding(&["policy", memory, key], &message, hint));
            }
        }
    }
    found
}

/// Returns true if both limits can be compared and `one` is below `other`.
fn is_below(one: MemoryLimit, other: MemoryLimit, total: Option<ByteSize>) -> bool {
    if let (MemoryLimit::Percent(one), MemoryLimit::Percent(other)) = (one, other) {
        return one < other;
    }
    let bytes = |limit: MemoryLimit| total.map_or_else(|| limit.bytes(), |total| limit.resolve(total));
    bytes(one).zip(bytes(other)).is_some_and(|(one, other)| one < other)
}

/// Finds replicas whose budgets together exceed the machine's memory: each replica has a budget of its own.
pub(super) fn replicas_above_the_machine(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let of_one = |one: &ModelSummary<'_>| {
        let (count, soft) = (one.model.run.replicas, one.model.policy.host.soft?);
        let each = soft.resolve(whole.memory).filter(|each| *each <= whole.memory)?;
        let all = ByteSize(each.0.saturating_mul(u64::from(count)));
        let message = format!(
            "{count} processes (`replicas`) may hold {each} each (`policy.host.soft`), {all} in all, and there are {}",
            whole.memory
        );
        let hint = "lower one of the two: the budget is that of each process";
        (count > 1 && all > whole.memory).then(|| one.finding(&["policy", "host", "soft"], &message, hint))
    };
    whole.models.iter().filter_map(of_one).collect()
}
