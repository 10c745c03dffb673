//! Rules about numbers of connections, requests and slots, and about memory for bodies.

use std::net::IpAddr;

use warden_policies::ByteSize;

use super::{ConfigSummary, ModelSummary, RuleFinding};

/// Reports if the allowed connections are too few to use all slots and to fill the queue.
pub(super) fn more_slots_than_connections(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let server = &whole.settings.server;
    let mut found = Vec::new();
    if server.connections_per_peer > server.connections {
        let message = format!(
            "`server.connections_per_peer` ({}) is above `server.connections` ({}), so one client may take them all",
            server.connections_per_peer, server.connections
        );
        found.push(RuleFinding::new(
            &["server", "connections_per_peer"],
            message,
            "lower it, or raise `server.connections`",
        ));
    }
    // An HTTP/2 connection carries several requests at a time.
    let several = server.h2c || (server.h2 && !server.tls_cert.is_empty());
    let each = if several { u64::from(server.h2_streams) } else { 1 };
    let most = (server.connections as u64).saturating_mul(each.max(1));
    let slots: u64 = whole.models.iter().filter_map(ModelSummary::concurrent_requests).sum();
    if slots > most {
        let message = format!(
            "the models take {slots} requests at a time, and `server.connections` lets {most} in: the other {} slots are \
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

/// Finds models that take more requests than slots: the rest waits in the process, and a replacement loses
/// it.
pub(super) fn more_requests_than_slots(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let of_one = |one: &ModelSummary<'_>| {
        let (most, slots) = (one.model.max_in_flight?, one.slots?);
        let message = format!(
            "`max_in_flight` is {most}, and a process has {slots} slots: {} requests wait inside of it, where they are lost \
             with it",
            most.checked_sub(slots).filter(|more| *more > 0)?
        );
        let hint =
            "leave `max_in_flight` out, or raise `-np` in `args`: what waits in our queue survives a process";
        Some(one.finding(&["max_in_flight"], &message, hint))
    };
    whole.models.iter().filter_map(of_one).collect()
}

/// Reports if the largest body exceeds the memory of a client: a body is held until its model is known.
pub(super) fn bodies_above_their_memory(whole: &ConfigSummary<'_>) -> Vec<RuleFinding> {
    let server = &whole.settings.server;
    let bodies = [
        ("body_bytes", server.body_bytes),
        ("audio_body_bytes", server.audio_body_bytes),
        ("text_body_bytes", server.text_body_bytes),
        ("control_body_bytes", server.control_body_bytes),
    ];
    let most = ByteSize(warden_gateway::max_client_bytes(server.buffered_bytes.0));
    let large = bodies.into_iter().filter(|(_, limit)| *limit > most);
    large
        .map(|(key, limit)| {
            let message = format!(
                "`server.{key}` allows bodies of {limit}, and of `server.buffered_bytes`, which is {}, one client holds {most} at \
                 most: a body that is larger and has to be held is never served",
                server.buffered_bytes
            );
            // Computed from the limit per client: with `enough` in total, a client may hold `limit` bytes.
            let enough = ByteSize(limit.0.saturating_add(limit.0.div_ceil(2)).saturating_add(3));
            let hint = format!("raise `server.buffered_bytes` to {enough} or more, or lower `server.{key}`");
            RuleFinding::new(&["server", key], message, hint)
        })
        .collect()
}

/// Reports if the addresses for clients and for operators are the same.
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
