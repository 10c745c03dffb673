//! Measures how much memory a smaller context would free before any prompt: mostly the KV cache.

use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;
use warden_policies::MemoryKind;
use warden_policies::sample::{SampleEdge, WorkDone};
use warden_policies::units::as_f64;
use warden_supervisor::SoloSpec;

use super::{HeadroomMeasurement, charged_bytes};
use crate::error::DiagnoseError;
use crate::lab::Lab;

/// Idle memory of a process with a smaller context.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SmallerContext {
    /// Tokens of context of all slots (`-c`).
    pub context: u64,
    /// Bytes for each kind of memory.
    pub idle: Vec<(MemoryKind, u64)>,
}

impl HeadroomMeasurement {
    /// Returns the bytes per token of context before any prompt; `None` if not measured.
    pub fn context_token(&self, series: MemoryKind) -> Option<f64> {
        let less = self.less_context.as_ref()?;
        let tokens = self.setup.context.checked_sub(less.context).filter(|tokens| *tokens > 0)?;
        let (_, bytes) = less.idle.iter().find(|(own, _)| *own == series)?;
        let whole = self.series.iter().find(|own| own.series == series)?.idle;
        Some(as_f64(whole.saturating_sub(*bytes)) / as_f64(tokens))
    }
}

/// Starts the server with a smaller context and reads its idle memory.
///
/// # Errors
/// The server does not start.
pub async fn measure_smaller_context(
    lab: &Lab,
    spec: &SoloSpec,
    context: u64,
    stop: &CancellationToken,
) -> Result<SmallerContext, DiagnoseError> {
    let mut spec = spec.clone();
    // llama-server uses the last occurrence of a flag.
    spec.command.args.extend(["--ctx-size".to_owned(), context.to_string()]);
    let measured = async {
        let solo = lab.starter.start(&spec).await.map_err(DiagnoseError::Start)?;
        tokio::time::sleep(lab.numbers.settle).await;
        let idle = solo.read_sample(SampleEdge::Idle, WorkDone::default(), 0, 0).await;
        Ok((solo, charged_bytes(&idle.sample)))
    };
    let (solo, idle) = stop.run_until_cancelled(measured).await.ok_or(DiagnoseError::Interrupted)??;
    solo.stop().await;
    Ok(SmallerContext { context, idle })
}

#[cfg(test)]
mod tests {
    use warden_experiment::headroom::ServerSetup;

    use super::super::HeadroomSeries;
    use super::*;

    #[test]
    fn what_a_token_of_context_takes_is_what_a_smaller_one_leaves_free() {
        let series = |idle| HeadroomSeries { series: MemoryKind::Host, idle, free: None, peaks: Vec::new() };
        let mut touched = HeadroomMeasurement {
            setup: ServerSetup {
                context: 8192,
                slots: 1,
                slot_context: 8192,
                sequence_context: None,
                ubatch: 512,
            },
            series: vec![series(1000 << 20)],
            broke: None,
            interrupted: false,
            less_context: None,
        };
        assert_eq!(touched.context_token(MemoryKind::Host), None);
        touched.less_context =
            Some(SmallerContext { context: 4096, idle: vec![(MemoryKind::Host, 488 << 20)] });
        assert_eq!(touched.context_token(MemoryKind::Host), Some(131_072.0));
        touched.less_context = Some(SmallerContext { context: 8192, idle: vec![(MemoryKind::Host, 0)] });
        assert_eq!(touched.context_token(MemoryKind::Host), None, "no smaller one");
    }
}
