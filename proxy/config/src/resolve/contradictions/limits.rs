//! Rules about four subjects: numbers of connections, requests and slots; groups of models that are never
//! loaded together; parameters that llama-warden changes in requests; files that are used for two purposes.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::Path;

use serde_json::Value;
use warden_policies::ByteSize;

use super::{ConfigSummary, ModelSummary, RuleFinding};
use crate::arguments;
use crate::problem::{quoted_key, similarity};
use crate::resolve::rules::TOKEN_LIMIT_PARAMETERS;

/// Reports if the allowed connections are too few to use all slots and to fill the queue.
pub(super) fn more_slots_than_connections(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let server = &whole.settings.server;
    let mut found = Vec::new();
    if server.connections_per_peer > server.connections {
        let message = format!(
            "`server.connections_per_peer` ({}) is above `server.connections` ({}), so one client may take them all",
            server.connections_per_peer, server.connections
        );
        let hint = "lower it, or raise `server.connections`";
        found.push(RuleFinding::new(&["server", "connections_per_peer"], message, hint));
    }
    let most = server.connections as u64;
    let slots: u64 = whole.models.iter().filter_map(ModelSummary::concurrent_requests).sum();
    if slots > most {
        let message = format!(
            "the models take {slots} requests at a time, and `server.connections` lets {most} in: the other \
             {} slots are \
             never used",
            slots - most
        );
        let hint = format!("raise `server.connections` to {slots} or more, or lower `-np` in `args`");
        found.push(RuleFinding::new(&["server", "connections"], message, hint));
    }
    for one in &whole.models {
        let depth = one.model.queue.depth as u64;
        if depth > most {
            let message = format!(
                "`queue.depth` is {depth}, and `server.connections` lets {most} requests in, so it never fills"
            );
            let hint = "lower `queue.depth`, or raise `server.connections`";
            found.push(one.finding(&["queue", "depth"], &message, hint));
        }
    }
    found
}

/// Finds models that take more requests than slots: a replacement loses those waiting in the process.
pub(super) fn more_requests_than_slots(one: &ModelSummary<'_>) -> Option<RuleFinding> {
    let most = one.model.max_in_flight?;
    let slots = one.slots?;
    let more = most.checked_sub(slots).filter(|more| *more > 0)?;
    let message = format!(
        "`max_in_flight` is {most}, and a process has {slots} slots: {more} requests wait inside of it, \
         where they are lost \
         with it"
    );
    let hint =
        "leave `max_in_flight` out, or raise `-np` in `args`: what waits in our queue survives a process";
    Some(one.finding(&["max_in_flight"], &message, hint))
}

/// Reports if the largest body exceeds the memory of a client: a body is held until its model is known.
pub(super) fn bodies_above_their_memory(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let server = &whole.settings.server;
    let most = ByteSize(warden_gateway::max_client_bytes(server.buffered_bytes.0));
    let mut found = Vec::new();
    for (key, limit) in [
        ("body_bytes", server.body_bytes),
        ("audio_body_bytes", server.audio_body_bytes),
        ("text_body_bytes", server.text_body_bytes),
        ("control_body_bytes", server.control_body_bytes),
    ] {
        if limit <= most {
            continue;
        }
        let message = format!(
            "`server.{key}` allows bodies of {limit}, and of `server.buffered_bytes`, which is {}, one \
             client holds {most} at \
             most: a body that is larger and has to be held is never served",
            server.buffered_bytes
        );
        // Computed from the limit per client: with `enough` in total, a client may hold `limit` bytes.
        let enough = ByteSize(limit.0.saturating_add(limit.0.div_ceil(2)).saturating_add(3));
        let hint = format!("raise `server.buffered_bytes` to {enough} or more, or lower `server.{key}`");
        found.push(RuleFinding::new(&["server", key], message, hint));
    }
    found
}

pub(super) fn clients_and_admin_on_one_port(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let server = &whole.settings.server;
    let Some((host, port)) = whole.settings.admin.address.as_deref().and_then(|text| text.rsplit_once(':'))
    else {
        return Vec::new();
    };
    let same = server.port != 0 && port.parse() == Ok(server.port);
    // The admin address is a loopback address, so it differs from the address of a network card.
    let apart = server.host.parse::<IpAddr>().is_ok_and(|ip| {
        let other = host.trim_matches(['[', ']']).parse::<IpAddr>();
        !ip.is_unspecified() && other.is_ok_and(|other| other != ip)
    });
    if !same || apart {
        return Vec::new();
    }
    let message = format!(
        "`admin.address` is {host}:{port}, and `server.port` is {} on {}: one of the two cannot listen",
        server.port, server.host
    );
    vec![RuleFinding::new(&["admin", "address"], message, "give `admin.address` another port").fatal()]
}

/// Least similarity of two group names at which one of them may be a typing error.
const MIN_TYPO_SIMILARITY: f64 = 0.8;

fn groups<'a>(whole: &'a ConfigSummary<'a>) -> BTreeMap<&'a str, Vec<&'a ModelSummary<'a>>> {
    let mut all: BTreeMap<&str, Vec<&ModelSummary<'_>>> = BTreeMap::new();
    for one in &whole.models {
        for group in &one.model.groups {
            all.entry(group).or_default().push(one);
        }
    }
    all
}

/// Finds groups with a single model: they exclude nothing, and their name may be a typing error.
pub(super) fn groups_of_one(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let all = groups(whole);
    let mut found = Vec::new();
    for (name, members) in &all {
        let [one] = members.as_slice() else { continue };
        let message = format!("no other model is in the group {}, so it excludes no model", quoted_key(name));
        let others = all.keys().filter(|other| *other != name);
        let like = others.max_by(|a, b| similarity(a, name).total_cmp(&similarity(b, name)));
        let hint = match like.filter(|like| similarity(like, name) > MIN_TYPO_SIMILARITY) {
            Some(like) => format!("is `{like}` meant?"),
            None => "name it in the other models' `groups`, too, or leave it out".to_owned(),
        };
        found.push(one.finding(&["groups"], &message, hint));
    }
    found
}

/// Finds groups with a pinned model: it is never unloaded, so the others can never be loaded after it.
pub(super) fn groups_closed_by_pin(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let all = groups(whole);
    let found = all.iter().filter(|(_, members)| members.len() > 1).filter_map(|(name, members)| {
        let pins: Vec<&&ModelSummary<'_>> = members.iter().filter(|one| one.model.run.pin).collect();
        let pin = pins.first()?;
        let message = format!(
            "it is pinned, and at most one model of the group {} is loaded: once it is, the others never are",
            quoted_key(name)
        );
        let found = pin.finding(&["pin"], &message, "take `pin` from it, or take it out of the group");
        Some(if pins.len() > 1 { found.fatal() } else { found })
    });
    found.collect()
}

pub(super) fn pins_above_max_loaded(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let most = whole.settings.loading.max_loaded;
    let pins = whole.models.iter().filter(|one| one.model.run.pin).count();
    if most == 0 || pins <= usize::try_from(most).unwrap_or(usize::MAX) {
        return Vec::new();
    }
    let message = format!(
        "{pins} models are pinned, and `loading.max_loaded` is {most}: the last of them are never loaded"
    );
    vec![RuleFinding::new(&["loading", "max_loaded"], message, "raise it, or pin fewer models").fatal()]
}

/// Finds an access log that is also used as a model or a key file.
pub(super) fn files_with_two_uses(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let settings = whole.settings;
    let access = Path::new(&settings.log.access);
    if access.as_os_str().is_empty() {
        return Vec::new();
    }
    let mut others = vec![
        ("server.tls_cert".to_owned(), Path::new(&settings.server.tls_cert)),
        ("server.tls_key".to_owned(), Path::new(&settings.server.tls_key)),
        ("server.keys".to_owned(), Path::new(&settings.server.keys)),
    ];
    for one in &whole.models {
        let model = one.model.model.as_deref().or_else(|| arguments::model_path(one.args).map(Path::new));
        let files = [("model", model), ("binary", one.model.binary.as_deref())];
        let named = |(key, path): (_, Option<_>)| Some((format!("models.{}.{key}", one.name), path?));
        others.extend(files.into_iter().filter_map(named));
    }
    let Some((other, path)) = others.iter().find(|(_, other)| *other == access) else { return Vec::new() };
    let message = format!("`log.access` is written to, and `{other}` is the same file, {}", path.display());
    vec![RuleFinding::new(&["log", "access"], message, "name another file for `log.access`").fatal()]
}

/// Finds defaults above their limit, which are reduced to it, and limits above the context, which have no
/// effect.
pub(super) fn defaults_above_their_limit(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let mut found = Vec::new();
    for one in &whole.models {
        let request = &one.model.request;
        let Some(most) = request.max_tokens else { continue };
        for (table, all) in [("default", &request.default), ("set", &request.set)] {
            let above = TOKEN_LIMIT_PARAMETERS.iter().filter_map(|key| {
                let asked = all.get(*key).and_then(Value::as_u64).filter(|asked| *asked > most)?;
                Some((*key, asked))
            });
            for (key, asked) in above {
                let message = format!(
                    "`request.{table}` asks for {asked} tokens (`{key}`), and `request.max_tokens` lets \
                     {most} be generated"
                );
                let hint = format!("lower `{key}` to {most} or less, or raise `request.max_tokens`");
                found.push(one.finding(&["request", table, key], &message, hint));
            }
        }
        // A context of 0 means the model's own context, which is not known here.
        if let Some(context) = arguments::context(one.args).filter(|context| (1..=most).contains(context)) {
            let message = format!(
                "`request.max_tokens` lets {most} tokens be generated, and a process has {context} tokens \
                 of context for prompt and \
                 answer"
            );
            let hint = format!("lower `request.max_tokens` below {context}, or raise `-c` in `args`");
            found.push(one.finding(&["request", "max_tokens"], &message, hint));
        }
    }
    found
}

/// Finds defaults for parameters that are always set: such a default is never used.
pub(super) fn defaults_also_set(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let mut found = Vec::new();
    for one in &whole.models {
        let request = &one.model.request;
        for key in request.default.keys().filter(|key| request.set.contains_key(*key)) {
            let message = format!(
                "`request.set` gives every request a `{key}`, so that in `request.default` is never used"
            );
            found.push(one.finding(&["request", "default", key], &message, "keep one of the two"));
        }
    }
    found
}
