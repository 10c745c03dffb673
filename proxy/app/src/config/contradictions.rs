//! Settings that are right by themselves and contradict each other: one list of rules over the resolved configuration.
//!
//! A rule looks at the whole and says what it found, with the numbers and with the keys that would cure it. What cannot be
//! meant is a problem and stops the start; what may be meant is a warning. Pure: no files, no clock.

use std::time::Duration;

use warden_policies::allowance::Allowance;
use warden_policies::units::{MIB, span};
use warden_policies::{ByteSize, MemoryLimit};

use super::policy::Budgets;
use super::settings::{Model, Settings};

/// What the rules look at.
pub(super) struct Whole<'a> {
    /// Everything but the models.
    pub(super) settings: &'a Settings,
    /// Memory that we may use.
    pub(super) memory: ByteSize,
    /// The models.
    pub(super) models: Vec<One<'a>>,
}

/// One model.
pub(super) struct One<'a> {
    /// Its name.
    pub(super) name: &'a str,
    /// What is configured.
    pub(super) model: &'a Model,
    /// What its processes are told to keep.
    pub(super) keeps: Allowance,
    /// Slots of a process, where that is said.
    pub(super) slots: Option<u32>,
}

/// What a rule found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Found {
    /// The key at which it is told.
    pub(super) path: Vec<String>,
    /// What contradicts what.
    pub(super) message: String,
    /// The cure.
    pub(super) hint: String,
    /// It cannot be meant.
    pub(super) fatal: bool,
}

type Rule = fn(&Whole<'_>) -> Vec<Found>;

/// All rules, in the order in which they are told.
const RULES: [Rule; 15] = [
    hard_above_soft,
    budgets_of_a_few_bytes,
    budgets_above_the_machine,
    budgets_below_what_is_kept,
    floors_that_are_not_kept,
    more_slots_than_connections,
    more_requests_than_slots,
    bodies_above_their_memory,
    waits_that_outlast_a_request,
    probes_that_come_too_late,
    pauses_in_the_wrong_order,
    quiet_that_never_comes,
    windows_too_short_for_quiet,
    ages_below_the_pause,
    horizons_in_the_wrong_order,
];

/// Everything that contradicts.
pub(super) fn find(whole: &Whole<'_>) -> Vec<Found> {
    RULES.iter().flat_map(|rule| rule(whole)).collect()
}

impl Found {
    fn new(path: &[&str], message: String, hint: impl Into<String>) -> Self {
        let path = path.iter().map(|&key| key.to_owned()).collect();
        Self { path, message, hint: hint.into(), fatal: false }
    }

    fn fatal(self) -> Self {
        Self { fatal: true, ..self }
    }
}

impl One<'_> {
    /// A finding about this model, at one of its keys.
    fn found(&self, keys: &[&str], message: &str, hint: impl Into<String>) -> Found {
        let path: Vec<&str> = ["models", self.name].into_iter().chain(keys.iter().copied()).collect();
        Found::new(&path, format!("model `{}`: {message}", self.name), hint)
    }

    /// Requests of the slot kind that all its processes take at a time, where that is known.
    fn requests(&self) -> Option<u64> {
        let of_one = self.model.max_in_flight.or(self.slots)?;
        Some(u64::from(of_one) * u64::from(self.model.replicas))
    }
}

impl Whole<'_> {
    /// All budgets, each with its place: `whose` is empty for those of all backends.
    fn budgets(&self) -> Vec<(String, Vec<&str>, &'static str, Budgets)> {
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

    /// The same, one by one: whose, the keys, the limit.
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

/// A hard budget has to be above the soft one. A share of a GPU's memory cannot be compared with a size here.
fn hard_above_soft(whole: &Whole<'_>) -> Vec<Found> {
    let wrong = |(whose, path, memory, budgets): (String, Vec<&str>, &str, Budgets)| {
        let wrong = budgets.wrong_order((memory == "host").then_some(whole.memory))?;
        let keys: Vec<&str> = path.into_iter().chain([memory, "hard"]).collect();
        let hint = format!("`{memory}.hard` has to be the larger of the two");
        Some(Found::new(&keys, format!("{whose}{wrong}"), hint).fatal())
    };
    whole.budgets().into_iter().filter_map(wrong).collect()
}

/// A number without a unit is bytes, and no process of any use holds less than a MiB.
fn budgets_of_a_few_bytes(whole: &Whole<'_>) -> Vec<Found> {
    let small = |(whose, keys, limit): (String, Vec<&str>, MemoryLimit)| {
        let bytes = limit.bytes().filter(|bytes| bytes.0 < MIB)?;
        let message = format!(
            "{whose}a budget of {bytes} is below what any process holds, so it is always passed; a number without a unit \
             is bytes"
        );
        Some(Found::new(&keys, message, format!("write the unit, like `\"{}GiB\"`", bytes.0.clamp(1, 999))))
    };
    whole.limits().into_iter().filter_map(small).collect()
}

/// What is above the machine's memory is never reached: the machine ends first.
fn budgets_above_the_machine(whole: &Whole<'_>) -> Vec<Found> {
    let large = |(whose, keys, limit): (String, Vec<&str>, MemoryLimit)| {
        let bytes = limit.bytes().filter(|bytes| *bytes > whole.memory && keys.contains(&"host"))?;
        let message = format!(
            "{whose}the budget of {bytes} is above the memory that there is ({}), so it is never passed",
            whole.memory
        );
        Some(Found::new(&keys, message, "lower it, or write a share, like `\"80%\"`"))
    };
    whole.limits().into_iter().filter_map(large).collect()
}

/// Caches fill up by design: a budget below their bound is passed without any leak.
fn budgets_below_what_is_kept(whole: &Whole<'_>) -> Vec<Found> {
    let of_one = |one: &One<'_>| {
        let host = one.model.policy.host;
        // `auto` knows what it keeps.
        let known =
            |(key, limit): (&'static str, Option<MemoryLimit>)| Some((key, limit?.resolve(whole.memory)?));
        let (key, budget) = [("soft", host.soft), ("hard", host.hard)].into_iter().find_map(known)?;
        let bound = one.keeps.cache_bound();
        if bound.is_some_and(|bound| bound < budget.0) {
            return None;
        }
        let bound =
            bound.map_or("has no bound".to_owned(), |bound| format!("may grow to {}", ByteSize(bound)));
        let (count, slots) = one.keeps.checkpoints();
        let more = match count * slots {
            0 => String::new(),
            all => format!(
                "; up to {all} context checkpoints ({count} for each of {slots} slots) may come on top"
            ),
        };
        let message = format!("the budget of {budget} is below the prompt cache, which {bound}{more}");
        let hint = "lower the cache with `--cache-ram MIB` in `args`, or raise the budget";
        Some(one.found(&["policy", "host", key], &message, hint))
    };
    whole.models.iter().filter_map(of_one).collect()
}

/// Floors that are not kept cannot be tested.
fn floors_that_are_not_kept(whole: &Whole<'_>) -> Vec<Found> {
    let growth = &whole.settings.growth;
    if growth.kept >= growth.window {
        return Vec::new();
    }
    let message = format!("`growth.kept` ({}) is below `growth.window` ({})", growth.kept, growth.window);
    let hint = "keep at least as many floors as a test looks at";
    vec![Found::new(&["growth", "kept"], message, hint).fatal()]
}

/// Slots that no connection can reach, and a queue that cannot fill.
fn more_slots_than_connections(whole: &Whole<'_>) -> Vec<Found> {
    let server = &whole.settings.server;
    let mut found = Vec::new();
    if server.connections_per_peer > server.connections {
        let message = format!(
            "`server.connections_per_peer` ({}) is above `server.connections` ({}), so one client may take them all",
            server.connections_per_peer, server.connections
        );
        found.push(Found::new(
            &["server", "connections_per_peer"],
            message,
            "lower it, or raise `server.connections`",
        ));
    }
    // A connection of HTTP/2 carries several requests.
    let several = server.h2c || (server.h2 && !server.tls_cert.is_empty());
    let each = if several { server.h2_streams as u64 } else { 1 };
    let most = (server.connections as u64).saturating_mul(each.max(1));
    let slots: u64 = whole.models.iter().filter_map(One::requests).sum();
    if slots > most {
        let message = format!(
            "the models take {slots} requests at a time, and `server.connections` lets {most} in: the other {} slots are \
             never used",
            slots - most
        );
        let hint = format!("raise `server.connections` to {slots} or more, or lower `-np` in `args`");
        found.push(Found::new(&["server", "connections"], message, hint));
    }
    for one in &whole.models {
        let depth = one.model.queue.depth as u64;
        if depth > most {
            let message = format!(
                "`queue.depth` is {depth}, and `server.connections` lets {most} requests in, so it never fills"
            );
            let hint = "lower `queue.depth`, or raise `server.connections`";
            found.push(one.found(&["queue", "depth"], &message, hint));
        }
    }
    found
}

/// What a process has no slot for waits inside of it, where a replacement cannot carry it over.
fn more_requests_than_slots(whole: &Whole<'_>) -> Vec<Found> {
    let of_one = |one: &One<'_>| {
        let (most, slots) = (one.model.max_in_flight?, one.slots?);
        let message = format!(
            "`max_in_flight` is {most}, and a process has {slots} slots: {} requests wait inside of it, where they are lost \
             with it",
            most.checked_sub(slots).filter(|more| *more > 0)?
        );
        let hint =
            "leave `max_in_flight` out, or raise `-np` in `args`: what waits in our queue survives a process";
        Some(one.found(&["max_in_flight"], &message, hint))
    };
    whole.models.iter().filter_map(of_one).collect()
}

/// A body is held until its model is known: one that is larger than all the memory for bodies is never served.
fn bodies_above_their_memory(whole: &Whole<'_>) -> Vec<Found> {
    let server = &whole.settings.server;
    let bodies = [
        ("body_bytes", server.body_bytes),
        ("audio_body_bytes", server.audio_body_bytes),
        ("text_body_bytes", server.text_body_bytes),
        ("control_body_bytes", server.control_body_bytes),
    ];
    let large = bodies.into_iter().filter(|(_, limit)| *limit > server.buffered_bytes);
    large
        .map(|(key, limit)| {
            let message = format!(
                "`server.{key}` allows bodies of {limit}, and `server.buffered_bytes` holds {} of all of them: one that is larger \
                 than that is never served",
                server.buffered_bytes
            );
            let hint = format!("raise `server.buffered_bytes` to {limit} or more, or lower `server.{key}`");
            Found::new(&["server", key], message, hint)
        })
        .collect()
}

/// The limit of a whole exchange counts from its beginning, waiting included.
fn waits_that_outlast_a_request(whole: &Whole<'_>) -> Vec<Found> {
    let limit = whole.settings.upstream.exchange_timeout;
    let of_one = |one: &One<'_>| {
        let wait = one.model.queue.wait;
        if wait >= limit {
            let message = format!(
                "`queue.wait` is {}, and a request ends after {} (`upstream.exchange_timeout`), waiting included",
                span(wait),
                span(limit)
            );
            return Some(one.found(
                &["queue", "wait"],
                &message,
                "raise `upstream.exchange_timeout`, or lower `queue.wait`",
            ));
        }
        let times = &one.model.lifecycle;
        let replacement = times.drain_deadline.saturating_add(times.stop_grace);
        (replacement >= limit).then(|| {
            let message = format!(
                "a replacement may take {} before the next process is started (`drain_deadline` and `stop_grace`), and who \
                 waits for it is given up after {} (`upstream.exchange_timeout`)",
                span(replacement),
                span(limit)
            );
            let hint = "raise `upstream.exchange_timeout`, or lower `drain_deadline`";
            one.found(&["lifecycle", "drain_deadline"], &message, hint)
        })
    };
    whole.models.iter().filter_map(of_one).collect()
}

/// Probes have to come, and be answered, before a verdict.
fn probes_that_come_too_late(whole: &Whole<'_>) -> Vec<Found> {
    let mut found = Vec::new();
    for one in &whole.models {
        let times = &one.model.lifecycle;
        let next = times.probe_interval.saturating_add(times.probe_timeout);
        if times.suspect_timeout < next {
            let message = format!(
                "a suspect process is replaced after {} (`suspect_timeout`), and a probe that could clear it may take {} \
                 (`probe_interval` and `probe_timeout`)",
                span(times.suspect_timeout),
                span(next)
            );
            found.push(one.found(
                &["lifecycle", "suspect_timeout"],
                &message,
                format!("raise `suspect_timeout` above {}", span(next)),
            ));
        }
        if times.start_probe_interval >= times.start_timeout {
            let message = format!(
                "a starting process is probed every {} (`start_probe_interval`) and given up after {} (`start_timeout`)",
                span(times.start_probe_interval),
                span(times.start_timeout)
            );
            found.push(one.found(&["lifecycle", "start_timeout"], &message, "raise `start_timeout`"));
        }
    }
    found
}

/// Pairs of which the second is to be the larger.
fn pauses_in_the_wrong_order(whole: &Whole<'_>) -> Vec<Found> {
    let mut found = Vec::new();
    for one in &whole.models {
        let (times, policy) = (&one.model.lifecycle, &one.model.policy.common);
        let pairs: [(&str, &str, Duration, &str, Duration); 2] = [
            ("lifecycle", "backoff_first", times.backoff_first, "backoff_cap", times.backoff_cap),
            ("policy", "min_interval_hard", policy.min_interval_hard, "min_interval", policy.min_interval),
        ];
        for (section, small, least, large, most) in pairs {
            if least > most {
                let message = format!("`{small}` ({}) is above `{large}` ({})", span(least), span(most));
                found.push(one.found(
                    &[section, small],
                    &message,
                    format!("`{large}` has to be the larger of the two"),
                ));
            }
        }
    }
    found
}

/// Whoever has to be quiet for longer than anybody waits for it is never found quiet.
fn quiet_that_never_comes(whole: &Whole<'_>) -> Vec<Found> {
    let of_one = |one: &One<'_>| {
        let policy = &one.model.policy.common;
        let message = format!(
            "quiet is nothing in flight for {} (`quiet_for`), and a replacement waits for it at most {} (`quiet_within`)",
            span(policy.quiet_for),
            span(policy.quiet_within)
        );
        let hint = "raise `quiet_within`, or lower `quiet_for`";
        (policy.quiet_for > policy.quiet_within).then(|| one.found(&["policy", "quiet_for"], &message, hint))
    };
    whole.models.iter().filter_map(of_one).collect()
}

/// A window has to be long enough to be quiet in, and to be looked at.
fn windows_too_short_for_quiet(whole: &Whole<'_>) -> Vec<Found> {
    let look = whole.settings.sensors.interval;
    let of_one = |one: &One<'_>| {
        let policy = &one.model.policy;
        let open = Duration::from_secs(u64::from(policy.only.minutes()) * 60);
        let needed = policy.common.quiet_for.max(look);
        if policy.only.is_always() || open > needed {
            return None;
        }
        let message = format!(
            "the windows `{}` are open for {} of a day, and what waits for them needs {} (`quiet_for` or \
             `sensors.interval`): it never happens there",
            policy.only,
            span(open),
            span(needed)
        );
        Some(one.found(&["policy", "only"], &message, "make the window longer"))
    };
    whole.models.iter().filter_map(of_one).collect()
}

/// A limit of age that the pause between replacements does not let happen.
fn ages_below_the_pause(whole: &Whole<'_>) -> Vec<Found> {
    let of_one = |one: &One<'_>| {
        let (age, pause) = (one.model.policy.max_age?, one.model.policy.common.min_interval);
        let message = format!(
            "`max_age` is {}, and replacements are at least {} apart (`min_interval`): the pause decides",
            span(age),
            span(pause)
        );
        (age < pause)
            .then(|| one.found(&["policy", "max_age"], &message, "raise `max_age`, or lower `min_interval`"))
    };
    whole.models.iter().filter_map(of_one).collect()
}

/// Growth that calls for a drain at once would never have been answered at a quiet moment before.
fn horizons_in_the_wrong_order(whole: &Whole<'_>) -> Vec<Found> {
    let of_one = |one: &One<'_>| {
        let policy = &one.model.policy.common;
        let message = format!(
            "growth that ends within {} drains at once (`growth_drain`), and within {} at the next quiet moment \
             (`growth_quiet`): no quiet moment is ever waited for",
            span(policy.growth_drain),
            span(policy.growth_quiet)
        );
        (policy.growth_drain > policy.growth_quiet).then(|| {
            one.found(&["policy", "growth_drain"], &message, "`growth_quiet` has to be the larger of the two")
        })
    };
    whole.models.iter().filter_map(of_one).collect()
}
