//! Whether a request goes to the canary of its model: another build of llama-server that is tried beside the model's own.
//!
//! Only what can be repeated goes there, so that whatever the canary does with it, the other build answers: its route only computes, all
//! of its body is held, and the operator lets it be executed again. And it goes there only if a lease can be had at once: nobody
//! waits for a canary.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;
use warden_policies::ModelName;
use warden_policies::canary::Arm;
use warden_policies::modes::OnDeath;
use warden_policies::quarantine::Standing;
use warden_supervisor::CanaryRoute;

use super::Exchange;
use crate::backend::backends::BackendLease;
use crate::body::intake::Intake;
use crate::observe::Tried;
use crate::refusal::Refusal;

/// A lease of the canary for this request, if it is one of its conversations. What it is in the trial is noted on the record.
pub(super) async fn lease(
    exchange: &mut Exchange,
    canary: &CanaryRoute,
    model: &ModelName,
    tokens: Option<u64>,
    intake: &mut Intake,
) -> Result<Option<Arc<dyn BackendLease>>, Refusal> {
    let shared = exchange.shared.clone();
    let on_death = exchange.rules(model).map_or(OnDeath::default(), |rules| rules.on_death);
    let may_repeat = exchange.route.computes && on_death == OnDeath::Continue;
    let most = shared.config.upstream.replay_bytes.0;
    if !may_repeat || !intake.take_all().await? || !intake.is_whole() || intake.len() > most {
        return Ok(None);
    }
    let Some(body) = intake.json() else { return Ok(None) };
    let conversation = conversation(&body);
    let tried = |arm| Some(Tried { conversation, arm, left: None });
    if !canary.takes(conversation) {
        exchange.flight.record.tried = tried(Arm::Base);
        return Ok(None);
    }
    let backends = &shared.upstream.backends;
    let is_suspect =
        intake.sent.print().is_some_and(|print| backends.standing(&canary.name, print) != Standing::Clear);
    // One that is busy is no part of the trial: which of its conversations are left out says nothing of either build.
    let lease = if is_suspect { None } else { backends.lease_now(&canary.name, exchange.route.kind, tokens) };
    if lease.is_some() {
        exchange.flight.record.tried = tried(Arm::Canary);
    }
    Ok(lease)
}

/// What stays the same over the turns of a conversation: all up to its first message of a user. Where there are no messages, all of it.
fn conversation(body: &[u8]) -> u64 {
    #[derive(Deserialize)]
    struct Body<'a> {
        #[serde(borrow)]
        system: Option<&'a RawValue>,
        #[serde(borrow)]
        instructions: Option<&'a RawValue>,
        #[serde(borrow)]
        messages: Option<Vec<&'a RawValue>>,
        #[serde(borrow)]
        input: Option<&'a RawValue>,
    }
    #[derive(Deserialize)]
    struct Message<'a> {
        #[serde(borrow)]
        role: Option<&'a RawValue>,
    }
    let is_users = |message: &&RawValue| {
        let role = serde_json::from_str::<Message<'_>>(message.get()).ok().and_then(|message| message.role);
        role.is_some_and(|role| role.get() == "\"user\"")
    };
    let mut hasher = DefaultHasher::new();
    let Ok(parsed) = serde_json::from_slice::<Body<'_>>(body) else {
        body.hash(&mut hasher);
        return hasher.finish();
    };
    // The Responses API names the list of messages `input`, which may also be one text.
    let listed = parsed.input.and_then(|input| serde_json::from_str::<Vec<&RawValue>>(input.get()).ok());
    let Some(messages) = parsed.messages.or(listed) else {
        body.hash(&mut hasher);
        return hasher.finish();
    };
    let first = messages.iter().position(is_users).map_or(messages.len(), |first| first + 1);
    let texts = messages[..first].iter().map(|message| message.get());
    let around = [parsed.system, parsed.instructions].into_iter().flatten().map(RawValue::get);
    around.chain(texts).for_each(|text| text.hash(&mut hasher));
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn of(body: &Value) -> u64 {
        conversation(body.to_string().as_bytes())
    }

    fn said(role: &str, text: &str) -> Value {
        json!({ "role": role, "content": text })
    }

    #[test]
    fn a_conversation_is_known_at_each_of_its_turns() {
        let (system, first) = (said("system", "be brief"), said("user", "a"));
        let begins = of(&json!({ "messages": [system, first], "temperature": 0 }));
        let goes_on = json!({ "messages": [system, first, said("assistant", "b"), said("user", "c")] });
        assert_eq!(begins, of(&goes_on));
        assert_ne!(begins, of(&json!({ "messages": [system, said("user", "b")] })));
        assert_ne!(begins, of(&json!({ "messages": [said("system", "be long"), first] })));
        let responses =
            |instructions: &str, input: Value| of(&json!({ "instructions": instructions, "input": input }));
        assert_eq!(
            responses("x", json!([first])),
            responses("x", json!([first, said("assistant", "b"), said("user", "c")]))
        );
        assert_ne!(responses("x", json!([first])), responses("y", json!([first])));
        assert_ne!(responses("x", json!("a")), responses("x", json!("b")));
        assert_ne!(of(&json!({ "prompt": "a" })), of(&json!({ "prompt": "b" })));
        assert_ne!(conversation(b"no json"), conversation(b"other"));
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
            (0..10_000_u64)
                .filter(|n| canary.takes(of(&json!({ "messages": [said("user", &n.to_string())] }))))
                .collect()
        };
        let (one, other) = (taken(&canary(0.1, 1)), taken(&canary(0.1, 2)));
        assert!((850..1150).contains(&one.len()), "{}", one.len());
        let both = one.iter().filter(|n| other.contains(n)).count();
        assert!(both < 200, "{both}");
        assert_eq!((taken(&canary(0.0, 1)).len(), taken(&canary(1.0, 1)).len()), (0, 10_000));
    }
}
