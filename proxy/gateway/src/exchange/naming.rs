//! Which model a request is for, by the name that it brings, and which rules hold for it.

use std::sync::Arc;

use warden_policies::{ModelName, is_pattern, pattern_matches};
use warden_supervisor::ResolveError;

use super::Exchange;
use crate::access::keys::Access;
use crate::backend::backends::Backends;
use crate::live::Live;
use crate::refusal::Refusal;
use crate::rules::{ModelRules, Name};

impl Exchange {
    /// The model that a name means for this client.
    pub(super) fn resolve(&mut self, access: &Access, name: Option<&str>) -> Result<ModelName, Refusal> {
        let (model, rules) = resolve(&self.live, access, &*self.shared.upstream.backends, name)?;
        self.renamed = rules;
        Ok(model)
    }

    /// The rules for requests for a model, by the name that was asked for.
    pub(super) fn rules(&self, model: &ModelName) -> Option<&ModelRules> {
        self.renamed.as_ref().or_else(|| self.live.models.get(model)).map(|rules| &**rules)
    }
}

/// What a name means for this client, with the rules of that name if it has its own.
pub(super) fn resolve(
    live: &Live,
    access: &Access,
    backends: &dyn Backends,
    name: Option<&str>,
) -> Result<(ModelName, Option<Arc<ModelRules>>), Refusal> {
    let exact = name.and_then(|name| live.by_name.get_key_value(name));
    let (name, meant) = match exact {
        Some(exact) => exact,
        None => match access.resolve(backends, name) {
            Ok(model) => return Ok((model, None)),
            Err(refusal) => {
                let unknown = matches!(refusal, Refusal::Resolve(ResolveError::Unknown { .. }));
                match name.filter(|_| unknown).and_then(|name| by_pattern(live, name)) {
                    Some(meant) => meant,
                    None => return Err(with_names(refusal, live, access)),
                }
            }
        },
    };
    // A key may have a right to the name or to models behind it.
    let by_name = access.may_use(&ModelName::new(name));
    let chosen = meant.choose(
        &backends.view(),
        |model| by_name || access.may_use(model),
        |model| backends.has_room(model),
        |model| backends.refuses(model),
    );
    match chosen {
        Some((model, rules)) => Ok((model.clone(), Some(Arc::clone(rules)))),
        None => Err(with_names(access.hide(backends, name), live, access)),
    }
}

/// The pattern for a name that nothing else has: of several the one with the most letters.
fn by_pattern<'a>(live: &'a Live, name: &str) -> Option<(&'a String, &'a Name)> {
    let patterns = live.by_name.iter().filter(|(pattern, _)| is_pattern(pattern));
    patterns.filter(|(pattern, _)| pattern_matches(pattern, name)).max_by_key(|(pattern, _)| pattern.len())
}

/// The model that stands in a path, in the same way: a name that is not the key's is no name there.
pub(super) fn in_path(
    resolved: Result<ModelName, Refusal>,
    exchange: &Exchange,
    access: &Access,
) -> Result<ModelName, Refusal> {
    resolved.map_err(|refusal| match refusal {
        Refusal::Hidden(_) => Refusal::Hidden(Box::new(Refusal::Upstream { known: known(exchange, access) })),
        other => other,
    })
}

/// All names that this client may know of, but for aliases.
pub(super) fn known(exchange: &Exchange, access: &Access) -> Vec<String> {
    let mut known = access.known(&*exchange.shared.upstream.backends);
    known.extend(shown(&exchange.live, access).cloned());
    known
}

/// The names without a process of their own that this client may know of, without patterns and models' own names.
pub(super) fn shown<'a>(live: &'a Live, access: &'a Access) -> impl Iterator<Item = &'a String> {
    let may_use = |model: &ModelName| access.may_use(model);
    let is_own = |name: &str, meant: &Name| meant.models.iter().any(|(model, _)| model.as_str() == name);
    let names = live.by_name.iter().filter(move |(name, meant)| !is_pattern(name) && !is_own(name, meant));
    let shown = names.filter(move |(name, meant)| {
        may_use(&ModelName::new(name)) || meant.models.iter().any(|(model, _)| may_use(model))
    });
    shown.map(|(name, _)| name)
}

/// A refusal that lists the names that there are lists these, too.
fn with_names(mut refusal: Refusal, live: &Live, access: &Access) -> Refusal {
    let hidden = match &mut refusal {
        Refusal::Hidden(told) => &mut **told,
        told => told,
    };
    if let Refusal::Resolve(ResolveError::Unknown { known, .. } | ResolveError::Missing { known }) = hidden {
        known.extend(shown(live, access).cloned());
    }
    refusal
}
