//! Rules about budgets: their order, the machine's memory, and the memory that a process is configured to
//! cache.

use warden_policies::units::MIB;
use warden_policies::{ByteSize, MemoryLimit};

use super::{ConfigSummary, ModelSummary, RuleFinding};
use crate::policy::BudgetPair;

struct BudgetRef<'a> {
    /// Prefix of messages about a model's budget; empty for a budget that all backends share.
    owner: String,
    path: Vec<&'a str>,
    budgets: BudgetPair,
}

impl BudgetRef<'_> {
    fn is_host(&self) -> bool {
        self.path.ends_with(&["host"])
    }

    fn finding(&self, key: &str, message: &str, hint: impl Into<String>) -> RuleFinding {
        let path = [&self.path[..], &[key]].concat();
        RuleFinding::new(&path, format!("{}{message}", self.owner), hint)
    }
}

impl ConfigSummary<'_> {
    fn budgets(&self) -> Vec<BudgetRef<'_>> {
        let mut all = Vec::new();
        for one in &self.models {
            let policy = &one.model.policy;
            for (memory, budgets) in [("host", policy.host), ("vram", policy.vram)] {
                let path = vec!["models", one.name, "policy", memory];
                all.push(BudgetRef { owner: format!("model `{}`: ", one.name), path, budgets });
            }
        }
        let shared = self.settings.shared;
        for (memory, budgets) in [("host", shared.host), ("vram", shared.vram)] {
            all.push(BudgetRef { owner: String::new(), path: vec!["shared", memory], budgets });
        }
        all
    }

    /// Returns the findings about single limits that are sizes.
    fn find_limits(
        &self,
        rule: impl Fn(&BudgetRef<'_>, &str, ByteSize) -> Option<RuleFinding>,
    ) -> Vec<RuleFinding> {
        let mut found = Vec::new();
        for budget in self.budgets() {
            for (key, limit) in [("soft", budget.budgets.soft), ("hard", budget.budgets.hard)] {
                let bytes = limit.and_then(MemoryLimit::bytes);
                found.extend(bytes.and_then(|bytes| rule(&budget, key, bytes)));
            }
        }
        found
    }
}

/// Finds hard budgets below the soft budget. Percentages of a GPU's memory cannot be compared with sizes
/// here.
pub(super) fn hard_above_soft(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let wrong = |budget: BudgetRef<'_>| {
        let wrong = budget.budgets.order_error(budget.is_host().then_some(whole.memory))?;
        let hint = format!("`{}.hard` has to be the larger of the two", budget.path.last()?);
        Some(budget.finding("hard", &wrong, hint).fatal())
    };
    whole.budgets().into_iter().filter_map(wrong).collect()
}

/// Finds budgets below 1 MiB, which are likely numbers without a unit; such numbers count as bytes.
pub(super) fn budgets_of_a_few_bytes(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    whole.find_limits(|budget, key, bytes| {
        if bytes.0 >= MIB {
            return None;
        }
        let message = format!(
            "a budget of {bytes} is below what any process holds, so it is always passed; a number without a unit \
             is bytes"
        );
        let like = if bytes.0 < 1000 { bytes.0.max(1) } else { 12 };
        Some(budget.finding(key, &message, format!("write the unit, like `\"{like}GiB\"`")))
    })
}

/// Finds budgets above the machine's memory, which can never be reached.
pub(super) fn budgets_above_the_machine(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    whole.find_limits(|budget, key, bytes| {
        if bytes <= whole.memory || !budget.is_host() {
            return None;
        }
        let message = format!(
            "the budget of {bytes} is above the memory that there is ({}), so it is never passed",
            whole.memory
        );
        Some(budget.finding(key, &message, "lower it, or write a share, like `\"80%\"`"))
    })
}

/// Finds budgets below the limit of caches that fill by design: such a budget is exceeded without a leak.
pub(super) fn budgets_below_declared_memory(one: &ModelSummary<'_>) -> Option<RuleFinding> {
    let host = one.model.policy.host;
    // `auto` accounts for declared caches.
    let known = |(key, limit): (&'static str, Option<MemoryLimit>)| Some((key, limit?.resolve(one.memory)?));
    let (key, budget) = [("soft", host.soft), ("hard", host.hard)].into_iter().find_map(known)?;
    let bound = one.declared.cache_bound();
    if bound.is_some_and(|bound| bound < budget.0) {
        return None;
    }
    let bound = bound.map_or("has no bound".to_owned(), |bound| format!("may grow to {}", ByteSize(bound)));
    let (count, slots) = one.declared.checkpoints();
    let more = match count * slots {
        0 => String::new(),
        all => {
            format!("; up to {all} context checkpoints ({count} for each of {slots} slots) may come on top")
        }
    };
    let message = format!("the budget of {budget} is below the prompt cache, which {bound}{more}");
    let hint = "lower the cache with `--cache-ram MIB` in `args`, or raise the budget";
    Some(one.finding(&["policy", "host", key], &message, hint))
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
                    "`policy.{memory}.{key}` is {own}, and `shared.{memory}.{key}`, over all processes, is \
                     {all}: that is passed first"
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

/// Finds replicas whose budgets together exceed the machine's memory: each replica has a separate budget.
pub(super) fn replicas_above_the_machine(one: &ModelSummary<'_>) -> Option<RuleFinding> {
    let count = one.model.run.replicas;
    let each = one.model.policy.host.soft?.resolve(one.memory)?;
    let all = ByteSize(each.0.saturating_mul(u64::from(count)));
    if each > one.memory || count <= 1 || all <= one.memory {
        return None;
    }
    let message = format!(
        "{count} processes (`replicas`) may hold {each} each (`policy.host.soft`), {all} in all, and there are {}",
        one.memory
    );
    let hint = "lower one of the two: the budget is that of each process";
    Some(one.finding(&["policy", "host", "soft"], &message, hint))
}
