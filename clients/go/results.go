package mlxstream

import (
	"strings"

	v1 "github.com/mlx-stream/mlx-stream/clients/go/v1"
)

// FinishReason says why a generation ended.
type FinishReason string

// The reasons. A value that this client does not know counts as unspecified.
const (
	FinishUnspecified FinishReason = "unspecified"
	FinishStop        FinishReason = "stop"
	FinishLength      FinishReason = "length"
	FinishCancelled   FinishReason = "cancelled"
	FinishDeadline    FinishReason = "deadline"
	FinishError       FinishReason = "error"
)

// Usage counts the tokens of a generation. CachedTokens are part of PromptTokens.
type Usage struct {
	PromptTokens, CachedTokens, GeneratedTokens uint32
}

// Generation is a finished one: the schema's answer, and its parts by the client's own names.
type Generation struct {
	*v1.CompleteResponse
}

// FinishReason says why it ended.
func (g *Generation) FinishReason() FinishReason { return finishReason(g.GetFinished()) }

// Usage counts its tokens.
func (g *Generation) Usage() Usage { return usageOf(g.GetFinished().GetStats()) }

func finishReason(finished *v1.Finished) FinishReason {
	name, known := v1.FinishReason_name[int32(finished.GetFinishReason())]
	if !known {
		return FinishUnspecified
	}
	return FinishReason(strings.ToLower(strings.TrimPrefix(name, "FINISH_REASON_")))
}

func usageOf(stats *v1.GenerateStats) Usage {
	return Usage{
		PromptTokens:    stats.GetPromptTokens(),
		CachedTokens:    stats.GetCachedTokens(),
		GeneratedTokens: stats.GetGeneratedTokens(),
	}
}
