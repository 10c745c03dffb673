//! Whether there is a spare moment for a diagnosis, and whether it has to make room again. Pure.

use warden_policies::ByteSize;

/// What matters of a moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Requests that are answered or wait, for all models.
    pub(crate) requests: usize,
    /// A model with a process that starts, drains or is replaced.
    pub(crate) moves: Option<String>,
    /// A model that is wanted and has to wait for memory.
    pub(crate) waits: Option<String>,
    /// Another build is tried beside a model's own.
    pub(crate) canary: bool,
    /// What one more process of the model takes, as far as that is known.
    pub(crate) needs: Memory,
    /// What can be had, less what is kept for whatever comes.
    pub(crate) spare: Spare,
    /// Reports that lie there.
    pub(crate) reports: usize,
}

/// Bytes of the host and of all GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    pub(crate) host: u64,
    pub(crate) gpus: u64,
}

/// Bytes that can be had; `None`: not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spare {
    pub(crate) host: Option<u64>,
    pub(crate) gpus: Option<u64>,
}

/// Why a diagnosis does not begin.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error("a diagnosis of {0} runs: one at a time")]
    Another(String),
    #[error("{0} request(s) are answered or wait: begin it when nothing is in flight")]
    Busy(usize),
    #[error("a process of {0} starts, drains or is replaced: try again when that is over")]
    Moves(String),
    #[error("{0} waits for memory, which a diagnosis would take")]
    Waits(String),
    #[error(
        "another build is being tried (`llama-warden canary status`), and a diagnosis would falsify that"
    )]
    Canary,
    #[error(
        "one more process takes {} of {what}, and {} are to spare: unload a model, or give the command another machine",
        ByteSize(*needs),
        ByteSize(*spare)
    )]
    Memory { what: &'static str, needs: u64, spare: u64 },
    #[error("{0} reports lie in {1}, as many as are listed: remove some")]
    Full(usize, String),
    #[error("{0}")]
    Cannot(String),
    #[error("this program ends, or another one takes its place")]
    Ending,
}

/// Whether it may begin.
///
/// # Errors
/// Why not.
pub(crate) fn may_begin(facts: &Facts) -> Result<(), Refused> {
    if facts.requests > 0 {
        return Err(Refused::Busy(facts.requests));
    }
    if let Some(model) = &facts.waits {
        return Err(Refused::Waits(model.clone()));
    }
    if let Some(model) = &facts.moves {
        return Err(Refused::Moves(model.clone()));
    }
    if facts.canary {
        return Err(Refused::Canary);
    }
    for (what, needs, spare) in
        [("host memory", facts.needs.host, facts.spare.host), ("VRAM", facts.needs.gpus, facts.spare.gpus)]
    {
        if let Some(spare) = spare.filter(|spare| needs > *spare) {
            return Err(Refused::Memory { what, needs, spare });
        }
    }
    Ok(())
}

/// Why one that runs has to end, if it has to. `before`: what was the case a moment ago, so that a start between two pictures is no
/// reason.
pub(crate) fn must_end(before: &Facts, now: &Facts) -> Option<String> {
    let model = now.waits.as_ref().filter(|_| before.waits.is_some())?;
    Some(format!("{model} waits for memory"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_begins_in_a_spare_moment_and_every_other_one_is_named() {
        let spare = Spare { host: Some(4 << 30), gpus: None };
        let good = Facts { spare, needs: Memory { host: 4 << 30, gpus: 1 << 40 }, ..Facts::default() };
        assert_eq!(may_begin(&good), Ok(()), "what is not known holds up nobody");
        let told = [
            Facts { requests: 2, ..good.clone() },
            Facts { waits: Some("a".into()), ..good.clone() },
            Facts { moves: Some("a".into()), ..good.clone() },
            Facts { canary: true, ..good.clone() },
            Facts { needs: Memory { host: (4 << 30) + 1, gpus: 0 }, ..good.clone() },
            Facts { spare: Spare { gpus: Some(3 << 30), ..spare }, ..good.clone() },
        ]
        .map(|facts| format!("{}\n", may_begin(&facts).unwrap_err()))
        .concat();
        insta::assert_snapshot!(told);
    }

    #[test]
    fn it_ends_for_a_model_that_waits_and_not_for_one_that_waited_a_moment() {
        let (calm, waits) = (Facts::default(), Facts { waits: Some("a".into()), ..Facts::default() });
        assert_eq!((must_end(&calm, &waits), must_end(&waits, &calm)), (None, None));
        assert_eq!(must_end(&waits, &waits).as_deref(), Some("a waits for memory"));
    }
}
