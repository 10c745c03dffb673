//! Rules about times that must be longer than other times.

use std::time::Duration;

use warden_policies::units::format_span;

use super::{ConfigSummary, ModelSummary, RuleFinding};
use crate::arguments;

/// Reports if `exchange_timeout`, which includes waiting, does not exceed the longest wait.
pub(super) fn waits_above_exchange_timeout(one: &ModelSummary<'_>) -> Option<RuleFinding> {
    let limit = one.settings.upstream.exchange_timeout;
    let wait = one.model.queue.wait;
    if wait >= limit {
        let message = format!(
            "`queue.wait` is {}, and a request ends after {} (`upstream.exchange_timeout`), waiting included",
            format_span(wait),
            format_span(limit)
        );
        let hint = "raise `upstream.exchange_timeout`, or lower `queue.wait`";
        return Some(one.finding(&["queue", "wait"], &message, hint));
    }
    let times = &one.model.lifecycle;
    // `queue.wait` does not include the time in which a process drains and stops, so add that time.
    let replacement = times.drain_deadline.saturating_add(times.stop_grace);
    let all = wait.saturating_add(replacement);
    if all < limit {
        return None;
    }
    let message = format!(
        "a caller may wait {} and, while a process drains and stops, {} more (`queue.wait`; `drain_deadline` and \
         `stop_grace`), and a request ends after {} (`upstream.exchange_timeout`)",
        format_span(wait),
        format_span(replacement),
        format_span(limit)
    );
    let hint =
        format!("raise `upstream.exchange_timeout` above {}, or lower `drain_deadline`", format_span(all));
    Some(one.finding(&["lifecycle", "drain_deadline"], &message, hint))
}

/// Finds limits on idle time that are not below the limit on the total time, and so have no effect.
pub(super) fn ineffective_idle_limits(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let server = &whole.settings.server;
    let upstream = &whole.settings.upstream;
    let idle = (upstream.stream_idle, upstream.exchange_timeout);
    let body = (server.body_timeout, server.body_deadline);
    let mut found = Vec::new();
    for ([section, key, all], (short, long), what) in [
        (["upstream", "stream_idle", "exchange_timeout"], idle, "an exchange"),
        (["server", "body_timeout", "body_deadline"], body, "a body"),
    ] {
        if short >= long {
            let message = format!(
                "`{section}.{key}` is {}, and {what} ends after {} in all (`{section}.{all}`): it never ends anything",
                format_span(short),
                format_span(long)
            );
            let hint = format!("lower `{key}`, or raise `{all}`");
            found.push(RuleFinding::new(&[section, key], message, hint));
        }
    }
    found
}

/// llama-server sends comments at this interval while it computes a prompt and sends nothing else.
const DEFAULT_PING_INTERVAL: Duration = Duration::from_secs(30);

/// Finds models whose streams may be silent for longer than `stream_idle`: until the first comment, or,
/// without comments, until a long prompt is computed.
pub(super) fn prompts_above_idle_limit(one: &ModelSummary<'_>) -> Option<RuleFinding> {
    let limit = one.settings.upstream.stream_idle;
    let given = arguments::ping_interval(one.args);
    if given.is_some_and(|seconds| seconds <= 0) {
        let prompt = one.settings.health.wedged_after;
        if limit >= prompt {
            return None;
        }
        let message = format!(
            "its streams are silent while a prompt is computed (`--sse-ping-interval`), which may take {} \
             (`health.wedged_after`), and a silent stream is ended after {} (`upstream.stream_idle`)",
            format_span(prompt),
            format_span(limit)
        );
        let hint = format!(
            "leave `--sse-ping-interval` out, or raise `upstream.stream_idle` to {}",
            format_span(prompt)
        );
        return Some(one.finding(&["args"], &message, hint));
    }
    let seconds = given.and_then(|seconds| u64::try_from(seconds).ok());
    let ping = seconds.map_or(DEFAULT_PING_INTERVAL, Duration::from_secs);
    if limit > ping {
        return None;
    }
    let message = format!(
        "a stream is ended after {} without a byte (`upstream.stream_idle`), and llama-server says \
         something only every {} \
         while it computes a prompt",
        format_span(limit),
        format_span(ping)
    );
    let hint = format!("raise `upstream.stream_idle` well above {}", format_span(ping));
    let keys: &[&str] = if given.is_some() { &["args"] } else { &[] };
    Some(one.finding(keys, &message, hint))
}

/// Finds deadlines (`suspect_timeout`, `start_timeout`) that are too short for one probe and its answer.
pub(super) fn late_probes(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let mut found = Vec::new();
    for one in &whole.models {
        let times = &one.model.lifecycle;
        let start_timeout = format_span(times.start_timeout);
        let next = times.probe_interval.saturating_add(times.probe_timeout);
        if times.suspect_timeout < next {
            let message = format!(
                "a suspect process is replaced after {} (`suspect_timeout`), and a probe that could clear \
                 it may take {} \
                 (`probe_interval` and `probe_timeout`)",
                format_span(times.suspect_timeout),
                format_span(next)
            );
            let hint = format!("raise `suspect_timeout` above {}", format_span(next));
            found.push(one.finding(&["lifecycle", "suspect_timeout"], &message, hint));
        }
        let key = ["lifecycle", "start_timeout"];
        if times.probe_timeout > times.start_timeout {
            let probe = format_span(times.probe_timeout);
            let message = format!(
                "a starting process is given up after {start_timeout} (`start_timeout`), and one probe of it may take \
                 {probe} (`probe_timeout`)"
            );
            let hint = format!("raise `start_timeout` above {probe}, for the load of a model");
            found.push(one.finding(&key, &message, hint));
        } else if times.start_probe_interval >= times.start_timeout {
            let message = format!(
                "a starting process is probed every {} (`start_probe_interval`) and given up after {start_timeout} \
                 (`start_timeout`)",
                format_span(times.start_probe_interval)
            );
            found.push(one.finding(&key, &message, "raise `start_timeout`"));
        }
    }
    found
}

/// Finds pairs of times in which the second should not be smaller than the first, but is.
pub(super) fn misordered_pauses(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let mut found = Vec::new();
    for one in &whole.models {
        let times = &one.model.lifecycle;
        let policy = &one.model.policy.common;
        let pauses = (policy.min_interval_hard, policy.min_interval);
        for ([section, small, large], (least, most)) in [
            (["lifecycle", "backoff_first", "backoff_cap"], (times.backoff_first, times.backoff_cap)),
            (["policy", "min_interval_hard", "min_interval"], pauses),
        ] {
            if least > most {
                let message =
                    format!("`{small}` ({}) is above `{large}` ({})", format_span(least), format_span(most));
                let hint = format!("`{large}` has to be the larger of the two");
                found.push(one.finding(&[section, small], &message, hint));
            }
        }
    }
    found
}

/// Finds models whose `quiet_for` exceeds `quiet_within`: such a quiet time is never reached.
pub(super) fn unreachable_quiet_time(one: &ModelSummary<'_>) -> Option<RuleFinding> {
    let policy = &one.model.policy.common;
    if policy.quiet_for <= policy.quiet_within {
        return None;
    }
    let message = format!(
        "quiet is nothing in flight for {} (`quiet_for`), and a replacement waits for it at most {} (`quiet_within`)",
        format_span(policy.quiet_for),
        format_span(policy.quiet_within)
    );
    let hint = "raise `quiet_within`, or lower `quiet_for`";
    Some(one.finding(&["policy", "quiet_for"], &message, hint))
}

/// Finds windows that are too short for a quiet time and a reading.
pub(super) fn windows_too_short_for_quiet(one: &ModelSummary<'_>) -> Option<RuleFinding> {
    let policy = &one.model.policy;
    let open = Duration::from_secs(u64::from(policy.only.open_minutes()) * 60);
    let needed = policy.common.quiet_for.max(one.settings.sensors.interval);
    if policy.only.is_always() || open > needed {
        return None;
    }
    let message = format!(
        "the windows `{}` are open for {} of a day, and what waits for them needs {} (`quiet_for` or \
         `sensors.interval`): it never happens there",
        policy.only,
        format_span(open),
        format_span(needed)
    );
    Some(one.finding(&["policy", "only"], &message, "make the window longer"))
}

/// Finds models whose `max_age` is below `min_interval`, and so is exceeded before a replacement is allowed.
pub(super) fn ages_below_the_pause(one: &ModelSummary<'_>) -> Option<RuleFinding> {
    let age = one.model.policy.max_age?;
    let pause = one.model.policy.common.min_interval;
    if age >= pause {
        return None;
    }
    let message = format!(
        "`max_age` is {}, and replacements are at least {} apart (`min_interval`): the pause decides",
        format_span(age),
        format_span(pause)
    );
    Some(one.finding(&["policy", "max_age"], &message, "raise `max_age`, or lower `min_interval`"))
}

/// Finds models that may exceed `max_age` outside the windows, and then wait for the next window.
pub(super) fn ages_outside_windows(one: &ModelSummary<'_>) -> Option<RuleFinding> {
    let policy = &one.model.policy;
    let age = policy.max_age?;
    let closed = Duration::from_secs(u64::from(policy.only.longest_closed()) * 60);
    if age >= closed {
        return None;
    }
    let message = format!(
        "`max_age` is {}, and the windows `{}` are closed for up to {}: a process may become {} old",
        format_span(age),
        policy.only,
        format_span(closed),
        format_span(age.saturating_add(closed))
    );
    let hint = "raise `max_age` above the time between two windows, or add a window to `only`";
    Some(one.finding(&["policy", "max_age"], &message, hint))
}

/// Finds models whose `growth_drain` exceeds `growth_quiet`: replacements never wait for a quiet moment.
pub(super) fn misordered_horizons(one: &ModelSummary<'_>) -> Option<RuleFinding> {
    let policy = &one.model.policy.common;
    if policy.growth_drain <= policy.growth_quiet {
        return None;
    }
    let message = format!(
        "growth that ends within {} drains at once (`growth_drain`), and within {} at the next quiet moment \
         (`growth_quiet`): no quiet moment is ever waited for",
        format_span(policy.growth_drain),
        format_span(policy.growth_quiet)
    );
    let hint = "`growth_quiet` has to be the larger of the two";
    Some(one.finding(&["policy", "growth_drain"], &message, hint))
}
