//! Decides whether a request goes to its model's canary, another build of llama-server under trial.
//!
//! A canary gets only requests that can be repeated, so that the normal build can answer after any failure.
//! The route must only compute, the whole body must be held, and the operator must allow a second execution.
//! A canary's lease must be available at once: no client waits for a canary.

use warden_policies::canary::TrialArm;
use warden_policies::modes::OnDeath;
use warden_policies::quarantine::RequestStanding;
use warden_supervisor::CanaryRoute;

use super::conversation;
use super::forward::PreparedRequest;
use super::state::HttpExchange;
use crate::backend::SharedLease;
use crate::observe::CanaryPart;
use crate::refusal::RequestRefusal;

/// Takes a lease of the canary if the conversation belongs to the canary's share, and records the choice.
pub(super) async fn lease_canary(
    exchange: &mut HttpExchange,
    canary: &CanaryRoute,
    prepared: &mut PreparedRequest,
) -> Result<Option<SharedLease>, RequestRefusal> {
    let PreparedRequest { search, intake, .. } = prepared;
    search.patience = canary.patience;
    let on_death = exchange.rules(&search.model).map_or(OnDeath::default(), |rules| rules.on_death);
    let may_repeat = exchange.route.computes && on_death == OnDeath::Continue;
    let most = search.upstream.config.upstream.replay_bytes.0;
    if !may_repeat || !intake.take_all().await? || !intake.is_whole() || intake.len() > most {
        return Ok(None);
    }
    let Some(body) = intake.json() else { return Ok(None) };
    let conversation = conversation::conversation_hash(&body);
    intake.sent.set_conversation(Some(conversation));
    let tried = |arm| Some(CanaryPart { conversation, arm, canary_failure: None });
    if !canary.takes_conversation(conversation) {
        exchange.flight.record.canary_part = tried(TrialArm::Base);
        return Ok(None);
    }
    let backends = &search.upstream.backends;
    let print = intake.sent.fingerprint();
    if print.is_some_and(|print| backends.request_standing(&canary.name, print) != RequestStanding::Clear) {
        return Ok(None);
    }
    // A request that finds the canary busy is left out of the comparison, which favours neither build.
    let lease = backends.lease_now(&canary.name, search.kind, search.tokens);
    if lease.is_some() {
        exchange.flight.record.canary_part = tried(TrialArm::Canary);
    }
    Ok(lease)
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use warden_policies::ModelName;

    use super::*;

    fn of(text: &str) -> u64 {
        let body = json!({ "messages": [{ "role": "user", "content": text }] });
        conversation::conversation_hash(body.to_string().as_bytes())
    }

    #[test]
    fn each_canary_gets_its_share_of_conversations_and_another_one_others() {
        let canary = |share, seed| CanaryRoute {
            name: ModelName::new("m@canary"),
            share,
            seed,
            patience: std::time::Duration::ZERO,
        };
        let taken = |canary: &CanaryRoute| -> Vec<u64> {
            (0..10_000_u64).filter(|n| canary.takes_conversation(of(&n.to_string()))).collect()
        };
        let (one, other) = (taken(&canary(0.1, 1)), taken(&canary(0.1, 2)));
        assert!((850..1150).contains(&one.len()), "{}", one.len());
        let both = one.iter().filter(|n| other.contains(n)).count();
        assert!(both < 200, "{both}");
        assert_eq!((taken(&canary(0.0, 1)).len(), taken(&canary(1.0, 1)).len()), (0, 10_000));
    }
}
