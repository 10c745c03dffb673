//! Reports the memory of the largest prompts, and if the worst case fits.

use serde::{Deserialize, Serialize};
use warden_experiment::headroom::{HeadroomVerdict, grouped, judge};
use warden_policies::experiment_needs::ExperimentNeeds;
use warden_policies::{ByteSize, MemoryKind};

use crate::headroom::HeadroomMeasurement;

/// Result of a measurement of headroom.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeadroomReport {
    /// Measurement with the present settings.
    pub touched: HeadroomMeasurement,
    /// Measurement with smaller micro-batches, made if the worst case did not fit.
    pub smaller: Option<HeadroomMeasurement>,
    /// Verdicts for each kind of memory, host memory first.
    pub verdicts: Vec<HeadroomVerdict>,
    /// Predictions for the longest prompt from prompts of at most half its length, compared with the
    /// measurement.
    pub foretold: Vec<PromptPrediction>,
}

/// Predicted and measured bytes of a prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PromptPrediction {
    /// Kind of memory.
    pub series: MemoryKind,
    /// Tokens of the longest prompt used for the prediction.
    pub from: u64,
    /// Tokens of the predicted prompt.
    pub tokens: u64,
    /// Predicted bytes.
    pub predicted: u64,
    /// Measured bytes.
    pub measured: u64,
}

const TABLE_HEAD: [&str; 8] =
    ["MEMORY", "IDLE", "PEAK", "AT TOKENS", "A TOKEN", "WORST CASE", "MAY HOLD", "FITS"];

impl HeadroomReport {
    /// Judges a measurement. `reserve` is the number of bytes that are to stay free.
    pub fn new(touched: HeadroomMeasurement, smaller: Option<HeadroomMeasurement>, reserve: u64) -> Self {
        let setup = touched.setup;
        let mut report = Self { touched, smaller, verdicts: Vec::new(), foretold: Vec::new() };
        for series in &report.touched.series {
            let Some(curve) = series.curve(&setup) else { continue };
            let other = report.smaller.as_ref().and_then(|smaller| {
                let own = smaller.series.iter().find(|own| own.series == series.series)?;
                Some((own.curve(&setup)?, smaller.setup.ubatch))
            });
            let other = other.as_ref().map(|(curve, ubatch)| (curve, *ubatch));
            let token = report.touched.context_token(series.series);
            report.verdicts.push(judge(&curve, &setup, series.limit(reserve), other, token));
            let Some((tokens, _)) = curve.points().last().copied() else { continue };
            let half = curve.truncated_at(tokens / 2);
            let from = half.as_ref().and_then(|half| half.points().last().copied());
            if let (Some(half), Some((from, _))) = (half, from) {
                let predicted = half.bytes_at(tokens, 1);
                let measured = curve.bytes_at(tokens, 1);
                report.foretold.push(PromptPrediction {
                    series: series.series,
                    from,
                    tokens,
                    predicted,
                    measured,
                });
            }
        }
        report
    }

    /// Returns true if the server can run out of memory, or did.
    pub fn can_run_out(&self) -> bool {
        self.touched.broke.is_some() || self.verdicts.iter().any(|verdict| verdict.fits() == Some(false))
    }

    /// Returns the measured needs, for later processes of the same build, model and arguments.
    pub fn learned_prices(&self) -> ExperimentNeeds {
        ExperimentNeeds {
            prices: self.verdicts.iter().map(|verdict| verdict.price).collect(),
            worst: self.verdicts.iter().map(|verdict| (verdict.series, verdict.worst)).collect(),
        }
    }

    /// Returns the table; the first row is the head.
    pub fn rows(&self) -> Vec<Vec<String>> {
        let mut rows = vec![TABLE_HEAD.map(str::to_owned).to_vec()];
        for verdict in &self.verdicts {
            let peaks = self.touched.series.iter().find(|own| own.series == verdict.series);
            let most = peaks.and_then(|own| own.peaks.iter().max_by_key(|peak| peak.bytes));
            let fits = match verdict.fits() {
                Some(true) => "yes",
                Some(false) => "no",
                None => "?",
            };
            rows.push(vec![
                verdict.series.to_string(),
                ByteSize(verdict.idle).to_string(),
                most.map_or_else(String::new, |peak| ByteSize(peak.bytes).to_string()),
                most.map_or_else(String::new, |peak| match peak.together {
                    0 | 1 => grouped(peak.tokens),
                    slots => format!("{slots} x {}", grouped(peak.tokens)),
                }),
                per_token(verdict.price.bytes_per_token),
                ByteSize(verdict.worst).to_string(),
                verdict.limit.map_or_else(|| "?".to_owned(), |limit| ByteSize(limit).to_string()),
                fits.to_owned(),
            ]);
        }
        rows
    }

    /// Returns the findings, a sentence a line.
    pub fn sentences(&self) -> Vec<String> {
        let mut lines: Vec<String> = self
            .verdicts
            .iter()
            .map(|verdict| format!("{}: {}", verdict.series, verdict.sentence()))
            .collect();
        let context = |verdict: &HeadroomVerdict| {
            if verdict.fits() != Some(false) {
                return None;
            }
            let token = per_token(verdict.context_token?);
            Some(format!("{}: each token of -c takes {token} before any prompt, measured", verdict.series))
        };
        lines.extend(self.verdicts.iter().filter_map(context));
        if let Some(broke) = &self.touched.broke {
            let times = if broke.concurrent > 1 {
                format!("{} prompts of ", broke.concurrent)
            } else {
                String::new()
            };
            lines.push(format!(
                "the server failed at {times}{} tokens: {}; figures beyond the previous length are predicted",
                grouped(broke.tokens),
                broke.why
            ));
        }
        if self.touched.interrupted {
            lines.push("it was interrupted: figures beyond the longest prompt are predicted".to_owned());
        }
        for foretold in &self.foretold {
            lines.push(format!(
                "{}: {} tokens would have been predicted from prompts of up to {} as {}; they took {}",
                foretold.series,
                grouped(foretold.tokens),
                grouped(foretold.from),
                ByteSize(foretold.predicted),
                ByteSize(foretold.measured)
            ));
        }
        lines
    }
}

fn per_token(bytes: f64) -> String {
    if bytes >= 1024.0 { format!("{:.1} KiB", bytes / 1024.0) } else { format!("{bytes:.0} B") }
}
